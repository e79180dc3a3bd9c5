"""Captures are kept in files by content: another process traces nothing, and what is broken or not private is not used."""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy
import pytest

import piper
from piper.api import capturing, kept_captures
from piper_compiler.capture import StoredCode
from piper_ir.errors import CaptureError, PiperWarning
from tests.capture_jobs import ONE, Net, job

PLAIN = functools.partial(Net, 2)
SPLIT = piper.Strategy(piper.Mesh(pp=2), piper.recipes.one_f_one_b(pp=2, microbatches=2))
AGAIN = """
import functools, piper
from piper.api import capturing
from tests.capture_jobs import Net, job
from tests.test_kept_captures import SPLIT, losses
def refused(job):
    raise AssertionError("captured again")
if {refuse}:
    capturing._capture = refused
print(losses(piper.compile(job(functools.partial(Net, 2)), SPLIT)))
"""


class Unknown(Net):
    """Holds an array that is too large to be looked into."""

    def __init__(self) -> None:
        super().__init__(1)
        self.table = numpy.zeros(2**18)


def losses(compiled: piper.Compiled) -> list[float]:
    return list(piper.execute(compiled, steps=2, launcher="inline").losses)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIPER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Mock:
    found = Mock(wraps=capturing._capture)
    monkeypatch.setattr(capturing, "_capture", found)
    monkeypatch.setattr(kept_captures, "_FILES", {})
    forget_all(monkeypatch)
    return found


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Begins anew, as another process does: what is in memory is written where it has grown, and forgotten."""

    def begin() -> None:
        kept_captures.write_grown()
        kept_captures._FILES.clear()
        forget_all(monkeypatch)

    return begin


def forget_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "_CAPTURES", {})


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("captures/*/*"))


def said(refuse: bool) -> str:
    """Return the losses that a process of its own prints; what other tests have registered here is unknown there."""
    script = AGAIN.replace("{refuse}", str(refuse))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env={**os.environ})
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def test_another_process_traces_nothing(folder: Path) -> None:
    first = said(refuse=False)
    assert len(files(folder)) == 1
    assert said(refuse=True) == first == str(losses(piper.compile(job(PLAIN), SPLIT)))


def test_what_was_asked_for_later_is_kept_too(counted: Mock, again: Callable[[], None], folder: Path) -> None:
    forms = [
        SPLIT,
        piper.Strategy(piper.Mesh(pp=2), [*piper.recipes.one_f_one_b(pp=2, microbatches=2), piper.recompute(piper.where())]),
        piper.Strategy(piper.Mesh(tp=2), [piper.shard(piper.where())]),
        piper.Strategy(piper.Mesh(pp=2), piper.recipes.one_f_one_b(pp=2, microbatches=1)),
    ]
    found = []
    for _ in range(2):
        made = [piper.compile(job(PLAIN), strategy) for strategy in forms]
        found.append([(c.program, c.plan, losses(c)) for c in made])
        again()
    assert found[0] == found[1]
    assert counted.call_count == 1
    assert len(files(folder)) == 1


def test_what_a_file_does_not_hold_is_captured(counted: Mock, again: Callable[[], None]) -> None:
    piper.compile(job(PLAIN), SPLIT)
    again()
    restored = piper.compile(job(PLAIN), SPLIT)
    shared = piper.compile(job(PLAIN), piper.Strategy(piper.Mesh(tp=2), [piper.shard(piper.where())]))
    assert counted.call_count == 2
    again()
    more = piper.compile(job(PLAIN), piper.Strategy(piper.Mesh(tp=2), [piper.shard(piper.where())]))
    assert counted.call_count == 2
    assert more.program == shared.program
    assert losses(restored) == pytest.approx(losses(more), rel=1e-5)  # code for other numbers of rows, of both forms
    assert counted.call_count == 3


def test_another_model_or_version_is_captured(counted: Mock, again: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    for made in (PLAIN, functools.partial(Net, 3), functools.partial(Net, 3)):
        piper.compile(job(made), ONE)
        again()
    assert counted.call_count == 2
    monkeypatch.setattr(kept_captures, "version", lambda: "another")
    piper.compile(job(PLAIN), ONE)
    assert counted.call_count == 3


def test_a_function_on_another_line_is_captured(counted: Mock, again: Callable[[], None]) -> None:
    """Messages and the code of steps name the user's lines."""
    source = "def model():\n    return Net(2)\n"
    for text in (source, source, "\n" + source):
        space = {"Net": Net, "__name__": __name__}
        exec(compile(text, __file__, "exec"), space)
        piper.compile(job(space["model"]), ONE)  # type: ignore[arg-type]  # a function
        again()
    assert counted.call_count == 2


def test_a_broken_file_is_replaced(counted: Mock, again: Callable[[], None], folder: Path) -> None:
    piper.compile(job(PLAIN), ONE)
    again()
    [file] = files(folder)
    for broken in (file.read_bytes()[:100], pickle.dumps("something else")):
        file.write_bytes(broken)
        with pytest.warns(PiperWarning, match="could not be read and is made anew"):
            piper.compile(job(PLAIN), ONE)
        again()
    piper.compile(job(PLAIN), ONE)
    assert counted.call_count == 3
    assert files(folder) == [file]


def test_only_a_folder_of_ones_own_is_used(counted: Mock, again: Callable[[], None], folder: Path) -> None:
    piper.compile(job(PLAIN), ONE)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder, folder / "captures", *files(folder)))
    again()
    folder.chmod(0o755)
    with pytest.warns(PiperWarning, match="nobody else can open"):
        piper.compile(job(PLAIN), ONE)
    assert counted.call_count == 2


def test_nothing_is_kept_without_a_content(counted: Mock, folder: Path) -> None:
    for _ in range(2):
        piper.compile(job(Unknown), ONE)
    assert counted.call_count == 2
    assert not files(folder)


def test_nothing_is_kept_where_it_is_turned_off(counted: Mock, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPER_CACHE", "")
    piper.compile(job(PLAIN), ONE)
    assert not folder.exists()


def test_the_oldest_files_go(counted: Mock, again: Callable[[], None], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_captures, "MOST_FILES", 1)
    for depth in (1, 2):
        piper.compile(job(functools.partial(Net, depth)), ONE)
        again()
    assert len(files(folder)) == 1


def test_what_was_compiled_is_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = piper.compile(job(PLAIN), SPLIT)
    copied = pickle.loads(pickle.dumps(compiled))
    assert (copied.program, copied.plan, copied.graph, copied.layers) == (
        compiled.program, compiled.plan, compiled.graph, compiled.layers
    )  # fmt: skip
    assert losses(copied) == losses(compiled)
    assert isinstance(copied.code, StoredCode)
    with pytest.raises(CaptureError, match="compiled in another process"):
        copied.code.trace(compiled.program.chunks[0].code, 7)
