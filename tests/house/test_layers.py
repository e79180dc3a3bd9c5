"""Who may import whom: docs/architecture.md's table of packages, enforced on the syntax tree of every module.

Imports under TYPE_CHECKING, inside functions and through importlib with a literal name count like all others.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.cases import each_case
from tests.helpers.source_tree import Module, circles, imported_modules, parsed
from tests.helpers.source_tree import modules as source_modules

ROOT = Path(__file__).resolve().parents[2]
STDLIB = sys.stdlib_module_names
ARCHITECTURE = ROOT / "docs" / "architecture.md"
HEADER = "| package | may import | and in one place only | holds |"


@dataclass(frozen=True)
class Layer:
    """What one package may import beside itself and the standard library."""

    source: Path
    everywhere: frozenset[str] = frozenset()
    within: tuple[str, frozenset[str]] = ("", frozenset())
    """The name of a module in any of the package's folders, and the packages that it may import, too."""

    def allowed(self, inner: Path) -> frozenset[str]:
        """Return what a module may import, given by its path inside of the package."""
        place, more = self.within
        return self.everywhere | more if inner.name == place else self.everywhere


def source_of(package: str) -> Path:
    own = ROOT / "packages" / package.removeprefix("piper_") / "src" / package
    return ROOT / "src" / package if package == "piper" else own


def names_in(cell: str) -> frozenset[str]:
    """Return the names in backticks of a cell of the table."""
    names = re.findall(r"`([\w./]+)`", cell)
    if re.sub(r"`[\w./]+`", "", cell).strip(" ,-"):
        raise ValueError(
            f"names in backticks are expected, separated by commas, or -, not {cell!r}"
        )
    return frozenset(names)


def layers(text: str) -> dict[str, Layer]:
    """Read the table of packages of docs/architecture.md: a row `package | names | place: names | anything` for
    each."""
    if text.count(HEADER) != 1:
        raise ValueError(f"one table with the header {HEADER} is expected")
    found = {}
    for line in text.partition(HEADER)[2].strip().splitlines()[1:]:
        if not line.startswith("|"):
            break
        first, everywhere, place_and_names, _ = (
            cell.strip() for cell in line.strip("|").split("|")
        )
        (package,) = names_in(first)
        place, colon, names = place_and_names.partition(":")
        within = (
            (next(iter(names_in(place))), names_in(names))
            if colon
            else ("", names_in(place_and_names))
        )
        if within[1] and not within[0]:
            raise ValueError(
                f"{package}: a place, a colon and names are expected, not {place_and_names!r}"
            )
        found[package] = Layer(source_of(package), names_in(everywhere), within)
    return found


LAYERS = layers(ARCHITECTURE.read_text(encoding="utf-8"))
# torch's private API may change with any release: the compiler uses it in modules of this name only, so that a new
# release is a change in one place.
PRIVATE_TORCH_MODULE = "_torch"


@dataclass(frozen=True)
class Import:
    module: str
    line: int


def imports(tree: ast.Module) -> Iterator[Import]:
    """Absolute imports; `from a import b` gives a.b, since b may be a module."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (Import(alias.name, node.lineno) for alias in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from (Import(f"{module}.{alias.name}", node.lineno) for alias in names)
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ) if not module.startswith("."):
                yield Import(module, node.lineno)


def dotted(node: ast.expr) -> str | None:
    """`a.b.c` as text, None for anything that is not a chain of names."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            prefix = dotted(value)
            return None if prefix is None else f"{prefix}.{attr}"
        case _:
            return None


def is_private_torch(name: str) -> bool:
    """torch._dynamo, torch.fx.experimental, torch.x._y; not torch.ops.aten._foo (an operator's name) nor dunders."""
    parts = name.split(".")
    if parts[0] != "torch" or parts[1:2] == ["ops"]:
        return False
    return parts[1:3] == ["fx", "experimental"] or any(
        p.startswith("_") and not p.endswith("__") for p in parts[1:]
    )


def violations(path: Path, name: str, rules: Layer) -> list[str]:
    """One line per import in `path`, a module of package `name`, that `rules` forbids."""
    tree = parsed(path)
    allowed = rules.allowed(path.relative_to(rules.source)) | {name}
    found = [
        f"{path}:{i.line}: imports {i.module}; {name} may import here: {', '.join(sorted(allowed))}"
        for i in imports(tree)
        if (top := i.module.partition(".")[0]) not in allowed and top not in STDLIB
    ]
    if name == "piper_capture" and not path.stem.startswith(PRIVATE_TORCH_MODULE):
        chains = (
            Import(text, n.lineno)
            for n in ast.walk(tree)
            if isinstance(n, ast.Attribute) and (text := dotted(n))
        )
        private = {
            (i.module, i.line) for i in (*imports(tree), *chains) if is_private_torch(i.module)
        }
        found += [
            f"{path}:{line}: {module} is private API of torch: use it in a module _torch*.py"
            for module, line in sorted(private)
        ]
    return found


def modules(rules: Layer) -> list[Path]:
    return sorted(rules.source.rglob("*.py"))


@each_case("name", LAYERS)
def test_a_package_imports_only_what_its_layer_allows(name: str) -> None:
    rules = LAYERS[name]
    assert modules(rules), f"no module under {rules.source}: the check would be empty"
    found = [line for path in modules(rules) for line in violations(path, name, rules)]
    assert not found, "\n".join(found)


def test_no_modules_import_each_other() -> None:
    """Lazy imports and those for typing count: a circle is one thing in several files."""
    found = circles(source_modules())
    assert not found, "\n".join(" and ".join(names) for names in found)


def test_negative_control_a_circle_is_found(tmp_path: Path) -> None:
    package = tmp_path / "house"
    package.mkdir()
    (package / "__init__.py").write_text("from house.a import A\n")
    (package / "a.py").write_text("def f():\n    from house.b import B\n")
    (package / "b.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.c import C\n"
    )
    (package / "c.py").write_text("import house.a\n")
    (package / "d.py").write_text("from house.a import A\n")
    assert circles(source_modules([tmp_path])) == [["house.a", "house.b", "house.c"]]


def past_faces(known: Mapping[str, Module]) -> list[str]:
    """Return the imports that reach past a face: another package is imported as a whole, or by one of its folders.

    The modules of `piper_ir` are the vocabulary of all packages, and are faces themselves, but for those of `verify`.
    """
    found = []
    for module in known.values():
        own = module.name.partition(".")[0]
        for name, line in imported_modules(module, known):
            package, _, rest = name.partition(".")
            face = known[name].is_package or name.rpartition(".")[2] in exported(
                known[name.rpartition(".")[0]]
            )
            vocabulary = (
                package == "piper_ir" and rest.count(".") < 2 and not rest.startswith("verify.")
            )
            if package != own and not face and not vocabulary:
                found.append(f"{module.name}:{line} imports {name}")
    return found


def exported(module: Module) -> set[str]:
    """Return `__all__` of a module: a directive may have the name of its file."""
    lists = [
        n.value
        for n in module.tree.body
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"
    ]
    return set().union(*map(ast.literal_eval, lists))


def test_no_import_reaches_past_a_face() -> None:
    assert not past_faces(source_modules())


def test_negative_control_an_import_past_a_face_is_found(tmp_path: Path) -> None:
    for package, files in {
        "house": {
            "__init__": "from house.door import door\n__all__ = ['door']\n",
            "door": "door = 1\n",
            "cellar": "",
            "roof/__init__": "",
        },
        "guest": {
            "__init__": "from house import cellar, door, roof\nfrom house.cellar import coal\n"
        },
    }.items():
        for name, text in files.items():
            path = tmp_path / package / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    assert past_faces(source_modules([tmp_path])) == [
        "guest:1 imports house.cellar",
        "guest:2 imports house.cellar",
    ]


def test_every_package_is_in_the_table() -> None:
    assert {p.name for p in ROOT.glob("packages/*/src/*") if (p / "__init__.py").is_file()} | {
        "piper"
    } == LAYERS.keys()


def test_the_places_of_the_table_exist() -> None:
    for name, rules in LAYERS.items():
        place, more = rules.within
        assert not more or any(
            rules.allowed(p.relative_to(rules.source)) >= more for p in modules(rules)
        ), (name, place)


ROW = "| `piper_runtime` | `piper_ir`, `torch` | `ray_cluster.py`: `ray` | anything |"


def test_the_table_is_read() -> None:
    (rules,) = layers(
        f"text\n\n{HEADER}\n|---|---|---|---|\n{ROW}\n\n| `other` | `table` |"
    ).values()
    assert rules == Layer(
        source_of("piper_runtime"),
        frozenset({"piper_ir", "torch"}),
        ("ray_cluster.py", frozenset({"ray"})),
    )
    for inner in ("ray_cluster.py", "launch/ray_cluster.py"):
        assert rules.allowed(Path(inner)) == {"piper_ir", "torch", "ray"}
    assert rules.allowed(Path("launch/pool.py")) == {"piper_ir", "torch"}


@each_case(
    "text",
    [
        "no table",
        f"{HEADER}\n|---|---|---|---|\n{ROW}\n{HEADER}\n",
        f"{HEADER}\n|---|---|---|---|\n{ROW.replace('`torch`', 'torch')}\n",
        f"{HEADER}\n|---|---|---|---|\n{ROW.replace('`ray_cluster.py`: ', '')}\n",
        f"{HEADER}\n|---|---|---|---|\n{ROW.removesuffix('anything |')}\n",
    ],
)
def test_negative_control_a_table_that_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|unpack"):
        layers(text)


TORCH = frozenset({"piper_ir", "torch", "piper_ops"})


@each_case(
    ("source", "package", "caught"),
    [
        ("import json, torch.nn", "piper_compiler", "torch.nn"),
        ("def f():\n    from torch import nn", "piper_compiler", "torch.nn"),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import piper",
            "piper_compiler",
            "piper",
        ),
        ("import importlib\nimportlib.import_module('torch')", "piper_compiler", "torch"),
        ("import optuna", "piper_capture", "optuna"),
        ("import torch._dynamo", "piper_capture", "torch._dynamo"),
        (
            "from torch._functorch import aot_autograd",
            "piper_capture",
            "torch._functorch.aot_autograd",
        ),
        ("import torch\ntorch._C._get_tracing_state()", "piper_capture", "torch._C"),
        (
            "from torch.fx.experimental import proxy_tensor",
            "piper_capture",
            "torch.fx.experimental",
        ),
    ],
)
def test_negative_control_a_forbidden_import_is_found(
    source: str, package: str, caught: str, tmp_path: Path
) -> None:
    rules = Layer(tmp_path, TORCH if package == "piper_capture" else frozenset({"piper_ir"}))
    path = tmp_path / "module.py"
    path.write_text(source)
    assert any(caught in line for line in violations(path, package, rules))


@each_case(
    ("source", "name"),
    [
        (
            "import json\nfrom piper_ir.ground.mesh import Mesh\nfrom . import torch\n"
            "from __future__ import annotations",
            "module.py",
        ),
        ("import torch, piper_ops\ntorch.ops.aten._softmax\ntorch.__version__", "module.py"),
        ("import torch._dynamo\nfrom torch.fx.experimental import proxy_tensor", "_torch.py"),
    ],
)
def test_negative_control_an_allowed_import_is_not_reported(
    source: str, name: str, tmp_path: Path
) -> None:
    module = tmp_path / name
    module.write_text(source)
    assert violations(module, "piper_capture", Layer(tmp_path, TORCH)) == []


MANIFEST = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


IMPORTED_AS = {"pyyaml": "yaml"}
"""The names that distributions are imported by, where these are others."""


def test_the_distribution_declares_what_its_packages_import() -> None:
    """No more and no less: otherwise it works only because another requirement brought one along."""
    imported = {
        i.module.partition(".")[0]
        for rules in LAYERS.values()
        for path in modules(rules)
        for i in imports(parsed(path))
    }
    names = (re.split(r"[>\[]", r)[0] for r in MANIFEST["project"]["dependencies"])
    named = {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names}
    table = {name for rules in LAYERS.values() for name in rules.everywhere | rules.within[1]}
    assert imported - STDLIB - set(LAYERS) == named == table - STDLIB - set(LAYERS)
    assert not [name for name in named if name.startswith("piper")], (
        "a name of ours on an index is anybody's"
    )


def test_the_distribution_has_every_package_and_no_links() -> None:
    where = {
        ROOT / folder for folder in MANIFEST["tool"]["setuptools"]["packages"]["find"]["where"]
    }
    assert where == {rules.source.parent for rules in LAYERS.values()}
    assert all((rules.source / "py.typed").is_file() for rules in LAYERS.values())
    tracked = subprocess.run(
        ["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert tracked and not [line for line in tracked.splitlines() if line.startswith("120000")], (
        "links are copied or lost"
    )


def test_there_is_one_version() -> None:
    assert MANIFEST["project"]["dynamic"] == ["version"]
    assert MANIFEST["tool"]["setuptools"]["dynamic"]["version"] == {"file": "VERSION"}
    assert list(ROOT.glob("packages/*/pyproject.toml")) == [], "one distribution"


def test_the_package_says_the_version_that_was_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    import piper

    name = MANIFEST["project"]["name"]
    monkeypatch.setattr(piper, "version", {name: "1.2.3"}.__getitem__)
    assert piper.__version__ == "1.2.3"


def loaded_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `code`."""
    script = f"import sys\ntry:\n    {code}\nfinally:\n    print('\\n@', *{{m.partition('.')[0] for m in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("@")[2].split())


LIBRARIES = {"torch", "numpy", "optuna", "ray", "pandas", "matplotlib"}
HEAVY = LIBRARIES | {
    "piper_capture",
    "piper_compiler",
    "piper_runtime",
    "piper_simulator",
    "piper_autotune",
}


def test_importing_piper_is_lazy() -> None:
    assert not loaded_after("import piper") & (HEAVY | {"typer", "rich"})


def test_help_of_the_command_is_lazy() -> None:
    entry = MANIFEST["project"]["scripts"]["piper"]
    module, _, function = entry.partition(":")
    call = (
        f"sys.argv = ['piper', '--help']; from {module} import {function}; sys.exit({function}())"
    )
    assert not loaded_after(call) & HEAVY


def test_a_list_of_recipes_needs_no_torch() -> None:
    """Without a file; importing torch would take most of the command's time."""
    call = "sys.argv = ['piper', 'recipes']; from piper.cli import main; sys.exit(main())"
    assert not loaded_after(call) & {"torch", "optuna", "ray", "pandas", "matplotlib"}


def test_importing_the_runtime_does_not_import_ray() -> None:
    assert "ray" not in loaded_after("import piper_runtime")


def test_negative_control_a_heavy_import_is_seen() -> None:
    assert "numpy" in loaded_after("import numpy")
