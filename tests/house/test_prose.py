"""Documents and docstrings can be read: lines are short, links and file names lead somewhere, nothing is a fragment."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.cases import each_case
from tests.helpers.source_tree import Module, modules

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
WIDEST = 120
LINK = re.compile(r"\]\(([^)#:\s]*)#([^)\s]+)\)")
FILE = re.compile(r"`((?:[\w-]+/)+[\w-]+\.(?:py|toml|json|txt|csv|png))`")
FRAGMENT = re.compile(
    r"(?:What|Whether|How|Where|When|Why|Which|Who|Whose|Of|As|That|Those|Between|So many|Up to|At "
    r"most|In the)\b"
)
"""The words with which a docstring begins that is a fragment."""
PHRASE = re.compile(r"(?:The|A|An|One|Each|Both|No) ")
"""The words with which the docstring of a constant, an alias or an attribute begins."""


def long_lines(text: str) -> Iterator[int]:
    """Yield the numbers of lines that are too long; the row of a table cannot be broken, and code is held by ruff."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        if len(line) > WIDEST and not fenced and not line.startswith("|"):
            yield number


def anchors(text: str) -> set[str]:
    """Return what a link may name of a document: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_anchors(path: Path, text: str) -> Iterator[str]:
    """Yield the links to a heading that the document they lead to does not have."""
    for target, anchor in LINK.findall(text):
        other = (path.parent / target).read_text(encoding="utf-8") if target else text
        if anchor not in anchors(other):
            yield f"{target}#{anchor}"


def missing_files(text: str) -> Iterator[str]:
    """Yield the files that a text names by their path from the root, and that are not there."""
    yield from (name for name in FILE.findall(text) if not (ROOT / name).is_file())


def docstrings(tree: ast.Module) -> Iterator[tuple[ast.Constant, bool]]:
    """Yield the docstrings of a module, each with whether it stands under an assignment, where no linter looks."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        documented = isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        )
        for before, statement in zip([None, *body], body):
            match statement:
                case ast.Expr(value=ast.Constant(value=str()) as text):
                    if before is None and documented:
                        yield text, False
                    elif isinstance(before, ast.Assign | ast.AnnAssign):
                        yield text, True


def docstring_problems(tree: ast.Module, source: str) -> Iterator[str]:
    """Yield what is wrong with the docstrings of a module, each with its line."""
    lines = source.splitlines()
    for node, under_assignment in docstrings(tree):
        text = inspect.cleandoc(str(node.value))
        summary, _, rest = text.partition("\n")
        if FRAGMENT.match(summary):
            yield f"{node.lineno}: begins with a fragment: {summary}"
        if under_assignment and not PHRASE.match(summary):
            yield f"{node.lineno}: begins with no article: {summary}"
        if under_assignment and (not summary.endswith(".") or (rest and not rest.startswith("\n"))):
            yield f"{node.lineno}: the first line is not a sentence: {summary}"
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            if len(lines[number - 1]) > WIDEST:
                yield f"{number}: more than {WIDEST} characters"


@each_case("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_document_can_be_read(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not list(long_lines(text)), f"lines of more than {WIDEST} characters"
    assert not list(broken_anchors(path, text))
    assert not list(missing_files(text))


def wrong_docstrings(module: Module) -> list[str]:
    source = module.path.read_text(encoding="utf-8")
    return [
        f"{module.path.relative_to(ROOT)}:{problem}"
        for problem in docstring_problems(module.tree, source)
    ]


def test_docstrings_can_be_read() -> None:
    wrong = [problem for module in modules().values() for problem in wrong_docstrings(module)]
    assert not wrong, "\n".join(wrong)


@each_case(
    ("source", "problem"),
    [
        ('"""Of each thing its name."""', "1: begins with a fragment"),
        ('class C:\n    """Whether it is one."""', "2: begins with a fragment"),
        ('def f():\n    """As `g`, for two."""', "2: begins with a fragment"),
        ('A = 1\n"""What it is."""', "2: begins with a fragment"),
        ('A: int\n"""How many things."""', "2: begins with a fragment"),
        ('class C:\n    a: int = 1\n    """Where it is."""', "3: begins with a fragment"),
        ('def f(self):\n    self.a = 1\n    """Which it is."""', "3: begins with a fragment"),
        ('A = 1\n"""Bytes of a thing."""', "2: begins with no article"),
        ('A = 1\n"""The bytes of a thing"""', "2: the first line is not a sentence"),
        ('A = 1\n"""The bytes of a thing.\nThey count."""', "2: the first line is not a sentence"),
        (f'def f():\n    """Return {"x" * WIDEST}."""', "2: more than 120 characters"),
    ],
)
def test_negative_controls_docstrings(source: str, problem: str) -> None:
    found = list(docstring_problems(ast.parse(source), source))
    assert found and found[0].startswith(problem)


def test_good_docstrings_pass() -> None:
    source = '"""Make things.\n\nWhat else.\n"""\nA = 1\n"""The number of things.\n\nOf them all.\n"""\nprint()\n"""What."""\n'
    assert not list(docstring_problems(ast.parse(source), source))


def test_negative_controls() -> None:
    long = "x" * (WIDEST + 1)
    assert list(long_lines(f"a\n{long}\n| {long}\n```\n{long}\n```\n{long}")) == [2, 7]
    text = "[a](#two-words) [b](#three) [c](memory.md#snapshots) [d](memory.md#nowhere)\n\n## Two words!\n"
    assert list(broken_anchors(ROOT / "docs" / "why.md", text)) == ["#three", "memory.md#nowhere"]
    assert list(missing_files("`docs/why.py`, `docs/nowhere.py`, `why.py`")) == ["docs/nowhere.py"]


NOUNLESS = (r"\bwhat\b", r"\bthose (?:that|of|which|who|in|with|whose)\b")


def without_noun(pattern: str, tree: ast.Module) -> Iterator[int]:
    """Yield the lines of docstrings with a pattern outside of quotes and backticks."""
    for node, _ in docstrings(tree):
        words = re.sub(r"`[^`]*`|\"[^\"]*\"", "", " ".join(str(node.value).split()))
        if re.search(pattern, words, re.IGNORECASE):
            yield node.lineno


@pytest.mark.parametrize("pattern", NOUNLESS)
def test_docstrings_have_the_noun_that_the_field_has(pattern: str) -> None:
    """What passes between chunks is an activation, and those of a rank are its shards."""
    found = [
        f"{m.path}:{line}" for m in modules().values() for line in without_noun(pattern, m.tree)
    ]
    assert len(found) <= 20, "\n".join(found)


def test_negative_controls_nouns() -> None:
    tree = ast.parse(
        '"""Return what a rank holds, and those of others."""\ndef f():\n    """Say "what"."""'
    )
    assert [list(without_noun(pattern, tree)) for pattern in NOUNLESS] == [[1], [1]]
