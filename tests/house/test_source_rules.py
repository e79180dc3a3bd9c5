"""Rules on the text of tracked files that no linter knows."""

import ast
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import conftest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src", "packages", "tests", "examples", "benchmarks")
# A code, then a reason behind a dash or a second hash sign.
SUPPRESSION = re.compile(r"#\s*(?:noqa|type:\s*ignore)\b(?P<rest>.*)")
ARGUED = re.compile(r"(?::\s*|\[)[a-zA-Z0-9, -]+?\]?\s+(?:-|#|—)\s*\w+")


def sources() -> list[Path]:
    return sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))


def unargued(text: str) -> list[int]:
    """Lines whose lint exception lacks its code or its reason."""
    lines = enumerate(text.splitlines(), start=1)
    return [
        n
        for n, line in lines
        if (found := SUPPRESSION.search(line)) and not ARGUED.match(found["rest"])
    ]


def test_every_lint_exception_argues_for_itself() -> None:
    found = [
        f"{p.relative_to(ROOT)}:{n}"
        for p in sources()
        if p != Path(__file__)
        for n in unargued(p.read_text(encoding="utf-8"))
    ]
    assert not found, f"write `# noqa: CODE - reason` or `# type: ignore[code]  # reason`: {found}"


def test_negative_control_an_exception_without_reason_is_found() -> None:
    silent = [
        "x = 1  # noqa",
        "x = 1  # noqa: E501",
        "f(x)  # type: ignore",
        "f(x)  # type: ignore[arg-type]",
    ]
    argued = [
        "x = 1  # noqa: E501 - a table",
        "f(x)  # type: ignore[arg-type]  # torch types it as Any",
        "x = 1  # a comment",
    ]
    assert unargued("\n".join(silent)) == [1, 2, 3, 4]
    assert unargued("\n".join(argued)) == []


def test_no_module_outgrows_its_reader() -> None:
    """500 lines: beyond that, two subjects usually share a file."""
    long = {
        str(p.relative_to(ROOT)): n
        for p in sources()
        if "tests" not in p.parts and (n := len(p.read_text().splitlines())) > 500
    }
    assert not long, long


def test_no_folder_of_source_outgrows_a_room() -> None:
    counts = Counter(p.parent for p in sources() if "src" in p.relative_to(ROOT).parts)
    assert not {str(folder.relative_to(ROOT)): n for folder, n in counts.items() if n > 18}


HOOKS = {"_repr_html_", "persistent_id", "persistent_load"}
"""The methods that only others call: Jupyter, and pickle."""


def uncalled(texts: Iterable[str], others: Iterable[str] = ()) -> list[str]:
    """Functions without a decorator whose name no text has but where they are defined."""
    texts = list(texts)
    words = Counter(word for text in (*texts, *others) for word in re.findall(r"\w+", text))
    defined = [
        node.name
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.decorator_list
    ]
    times = Counter(defined)
    return [n for n in times if words[n] == times[n] and not n.startswith("__") and n not in HOOKS]


def test_every_function_has_a_caller() -> None:
    """Tests do not count as callers; documents and examples do, since users call what they name."""
    own = [p for p in sources() if "src" in p.relative_to(ROOT).parts]
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.py")]
    read = [p.read_text(encoding="utf-8") for p in (*pages, *ROOT.glob("benchmarks/*.py"))]
    assert not uncalled((p.read_text(encoding="utf-8") for p in own), read)


def test_negative_control_a_function_without_a_caller_is_found() -> None:
    text = "def used(): ...\ndef lost(): ...\nused()\n"
    assert uncalled([text]) == ["lost"]
    assert uncalled([text], ["lost()"]) == []


def test_the_files_that_the_suite_sorts_exist() -> None:
    """A file that is renamed would stand at the end of the line, without a word."""
    assert all(
        (ROOT / file).is_file()
        for files in (*conftest.TOGETHER.values(), conftest.LONG)
        for file in files
    )
