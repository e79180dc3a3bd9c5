"""Captures are kept in files by content: another process traces nothing, and what is broken or not private is not
used."""

from __future__ import annotations

import errno
import functools
import os
import pickle
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
import torch
from platformdirs import user_cache_path

import piper
from piper.api.captures import capturing, installed, kept_captures, package_settings
from piper.api.captures.installed import InstalledState
from piper.views.explained.explain import explain
from piper_capture import StoredCode
from piper_capture.store import assemble
from piper_capture.trace import written_modules
from piper_ir.ground.errors import CaptureError, PiperWarning
from tests.helpers import expert_loops
from tests.helpers.capture_jobs import ONE, Net, job

PLAIN = functools.partial(Net, 2)
SPLIT = piper.Strategy(piper.Mesh(pp=2), piper.recipes.one_f_one_b(pp=2, microbatches=2))
AGAIN = """
import functools, piper
from piper.api.captures import capturing
from tests.helpers.capture_jobs import Net, job
from tests.captures.test_kept_captures import SPLIT, losses
def refused(job):
    raise AssertionError("captured again")
if {refuse}:
    capturing._capture = refused
print(losses(piper.compile(job(functools.partial(Net, 2)), SPLIT)))
"""


SHARED = """
import piper
from piper.models import MoEConfig
sizes = MoEConfig(layers=1, width=8, heads=2, kv_heads=2, hidden=8, vocab=16, length=4, experts=4, top_k=2, capacity_factor=1.25)
over = piper.recipes.data_parallel(over=("ep",))
strategy = piper.Strategy(piper.Mesh(ep={ep}), (*piper.recipes.expert_parallel(), *over))
print(piper.compile(piper.models.job(sizes, global_batch=8), strategy).plan.mesh.world, "ranks")
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
    for module in (
        installed,
        package_settings,
    ):  # packages that other tests have written and loaded do not count
        monkeypatch.setattr(module, "installed_modules", list)
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
    return files_in(folder / "captures")


def files_in(versions: Path) -> list[Path]:
    return sorted(versions.glob("*/*"))


def said(refuse: bool) -> str:
    """Return the losses that a process of its own prints; what other tests have registered here is unknown there."""
    script = AGAIN.replace("{refuse}", str(refuse))
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ},
    )
    assert not done.returncode, done.stderr
    return done.stdout.strip()


@pytest.mark.long
def test_another_process_traces_nothing(folder: Path) -> None:
    first = said(refuse=False)
    assert len(files(folder)) == 1
    assert said(refuse=True) == first == str(losses(piper.compile(job(PLAIN), SPLIT)))


@pytest.mark.long
def test_a_kept_capture_gives_its_warnings_again(counted: Mock, again: Callable[[], None]) -> None:
    """Every compile warns, in the same process and in another one that reads the kept file."""
    for begin in (list, list, again):
        begin()
        with pytest.warns(PiperWarning, match=r"'layers\.0\.experts' .* opaque") as heard:
            piper.compile(expert_loops.job(expert_loops.untagged), ONE)
        assert len(heard) == 1
    assert counted.call_count == 1


@pytest.mark.long
def test_what_was_asked_for_later_is_kept_too(
    counted: Mock, again: Callable[[], None], folder: Path
) -> None:
    rows = piper.recipes.one_f_one_b(pp=1, microbatches=8)  # one each
    forms = [
        SPLIT,
        piper.Strategy(
            piper.Mesh(pp=2),
            [*piper.recipes.one_f_one_b(pp=2, microbatches=2), piper.recompute(piper.where())],
        ),
        piper.Strategy(
            piper.Mesh(tp=2), [piper.shard(piper.where()), *rows, piper.recompute(piper.where())]
        ),
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


def test_kernels_of_inductor_come_from_what_is_kept(
    counted: Mock, again: Callable[[], None]
) -> None:
    """A kept capture has the steps with fusions, and makes them for another number of rows and to be explained."""
    options, found = piper.Options(kernels="inductor"), []
    for asked in ([SPLIT], [SPLIT], [SPLIT, ONE]):
        again()
        made = [piper.compile(job(PLAIN), strategy, options=options) for strategy in asked]
        found.append([(c.plan, c.code.export(c.plan.codes, c.plan.rows)) for c in made if c.code])
    assert found[0] == found[1] == found[2][:1]
    assert counted.call_count == 2, "the number of rows that is not kept is traced"
    for (_, codes), _ in zip(found[2], range(2), strict=True):
        assert any("FUSION" in step.source for code in codes.values() for step in code.values())
    again()
    kept = piper.compile(job(PLAIN), SPLIT, options=options)
    assert "indexes, which devices can share" in explain(kept)


@pytest.mark.long
def test_experts_that_are_shared_in_another_way_come_from_what_is_kept(folder: Path) -> None:
    for ep in (2, 4):
        done = subprocess.run(
            [sys.executable, "-c", SHARED.format(ep=ep)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == f"{ep} ranks\n", done.stderr


@pytest.mark.long
def test_what_a_file_does_not_hold_is_captured(counted: Mock, again: Callable[[], None]) -> None:
    piper.compile(job(PLAIN), SPLIT)
    again()
    restored = piper.compile(job(PLAIN), SPLIT)
    shared = piper.compile(
        job(PLAIN), piper.Strategy(piper.Mesh(tp=2), [piper.shard(piper.where())])
    )
    assert counted.call_count == 2
    again()
    more = piper.compile(job(PLAIN), piper.Strategy(piper.Mesh(tp=2), [piper.shard(piper.where())]))
    assert counted.call_count == 2
    assert more.program == shared.program
    assert losses(restored) == pytest.approx(
        losses(more), rel=1e-5
    )  # code for other numbers of rows, of both forms
    assert counted.call_count == 3


@pytest.mark.long
def test_a_kept_capture_is_cut_where_devices_share_work(
    counted: Mock, again: Callable[[], None]
) -> None:
    cut, whole = (
        piper.Strategy(piper.Mesh(tp=2), [piper.shard(piper.where(), cut=asked)])
        for asked in (True, False)
    )
    expected = losses(piper.compile(job(PLAIN), whole))
    again()
    assert losses(piper.compile(job(PLAIN), cut)) == pytest.approx(expected, rel=1e-5)
    assert counted.call_count == 2


def test_another_model_or_version_is_captured(
    counted: Mock, again: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for made in (PLAIN, functools.partial(Net, 3), functools.partial(Net, 3)):
        piper.compile(job(made), ONE)
        again()
    assert counted.call_count == 2
    monkeypatch.setattr(kept_captures, "version", lambda: "another")
    piper.compile(job(PLAIN), ONE)
    assert counted.call_count == 3


@pytest.mark.long
def test_a_function_on_another_line_is_captured(counted: Mock, again: Callable[[], None]) -> None:
    """Messages and the code of steps name the user's lines."""
    source = "class Moved(Net):\n    def forward(self, x):\n        return super().forward(x)\n"
    for text in (source, source, "\n" + source):
        space = {"Net": Net, "__name__": __name__}
        exec(compile(text, __file__, "exec"), space)
        piper.compile(job(functools.partial(space["Moved"], 2)), ONE)
        again()
    assert counted.call_count == 2


def test_code_with_other_names_than_the_kept_one_is_said(
    counted: Mock, again: Callable[[], None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something more is asked of a capture whose names this process does not make: its file goes."""
    piper.compile(job(PLAIN), ONE)
    again()
    named = assemble._Assembly._code
    monkeypatch.setattr(assemble._Assembly, "_code", lambda *given: f"{named(*given)}x")
    recomputed = replace(ONE, directives=[piper.recompute(piper.where(), keep="inputs")])
    with pytest.raises(CaptureError, match=r"other names in this one.*run the same again"):
        piper.compile(job(PLAIN), recomputed)
    assert not files(folder)
    piper.compile(job(PLAIN), recomputed)


def test_a_pickled_class_has_no_random_name() -> None:
    """Names of code are made of it, which are the same in each process."""
    source = "import torch\nclass Made(torch.nn.Module):\n    def forward(self, x):\n        return x.tanh()\n"
    texts = []
    for _ in range(2):
        space: dict[str, Any] = {"__name__": "__main__"}
        exec(source, space)
        texts.append(written_modules.pickled("made", space["Made"]()))
    assert texts[0] == texts[1]
    assert pickle.loads(texts[0])(torch.zeros(2)).tolist() == [0, 0]


@pytest.mark.long
def test_a_broken_file_is_replaced(counted: Mock, again: Callable[[], None], folder: Path) -> None:
    piper.compile(job(PLAIN), ONE)
    again()
    [file] = files(folder)
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 1
    for broken in (file.read_bytes()[:100], pickle.dumps("something else"), bytes(whole), b""):
        file.write_bytes(broken)
        with pytest.warns(PiperWarning, match="could not be read and is made anew"):
            piper.compile(job(PLAIN), ONE)
        again()
    piper.compile(job(PLAIN), ONE)
    assert counted.call_count == 5
    assert files(folder) == [file]


@pytest.mark.long
def test_a_folder_that_can_only_be_read_is_read(
    counted: Mock, again: Callable[[], None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    piper.compile(job(PLAIN), ONE)
    again()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "read-only file system")

    for owner, name in ((os, "utime"), (tempfile, "mkstemp"), (os, "replace"), (Path, "unlink")):
        monkeypatch.setattr(owner, name, refuse)
    piper.compile(job(PLAIN), SPLIT)
    with pytest.warns(PiperWarning, match="could not be kept.*read-only file system"):
        piper.compile(job(functools.partial(Net, 1)), ONE)
        again()
    assert counted.call_count == 2, "the second is of another model"
    assert len(files(folder)) == 1


@pytest.mark.long
def test_a_full_disk_leaves_no_half_of_a_file(
    counted: Mock, again: Callable[[], None], folder: Path
) -> None:
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.warns(PiperWarning, match="could not be kept.*File too large"):
            piper.compile(job(PLAIN), ONE)
            again()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not files(folder)
    piper.compile(job(PLAIN), ONE)
    assert len(files(folder)) == 1


def test_writers_at_once_leave_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_captures, "MOST_FILES", 1)
    (tmp_path / "version").mkdir()
    old = tmp_path / "version" / "left.part"
    old.touch()
    os.utime(old, (0, 0))
    contents = {bytes([k]) * 100_000 for k in range(4)}

    def write(content: bytes) -> None:
        for turn in range(50):
            kept_captures._replace(tmp_path / "version" / f"{turn % 3}.pickle", content)

    with ThreadPoolExecutor() as pool:
        writing = [pool.submit(write, content) for content in contents]
        while not all(one.done() for one in writing):
            for path in tmp_path.glob("*/*.pickle"):
                with suppress(FileNotFoundError):
                    assert path.read_bytes() in contents
        assert [one.result() for one in writing] == [None] * 4
    assert len(files_in(tmp_path)) == 1, "the file that was written last; nothing is left of others"


SCALE = 1.0


def scaled() -> Net:
    return Net(1, SCALE)


def test_what_changed_since_it_was_read_is_not_captured_in_its_place(
    counted: Mock, again: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    piper.compile(job(scaled), ONE)
    again()
    restored = piper.compile(job(scaled), ONE)
    assert counted.call_count == 1
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert restored.code is not None
    with pytest.raises(CaptureError, match="has changed since this was compiled"):
        restored.code.trace(restored.program.chunks[0].code, 7)


@pytest.mark.long
def test_another_version_of_an_installed_package_is_captured(
    counted: Mock, again: Callable[[], None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holds = {True: 1, False: 2}
    for same, calls in holds.items():
        monkeypatch.setattr(InstalledState, "hold", lambda _, same=same: same)
        for _ in range(1 + same):
            piper.compile(job(PLAIN), ONE)
            again()
        assert counted.call_count == calls
    monkeypatch.setattr(installed, "installed_state", lambda before: None)
    [file] = files(folder)
    file.unlink()
    piper.compile(job(PLAIN), ONE)
    again()
    assert not files(folder), "a file of a package has changed since it was loaded"


def test_only_a_folder_of_ones_own_is_used(
    counted: Mock, again: Callable[[], None], folder: Path
) -> None:
    piper.compile(job(PLAIN), ONE)
    assert all(
        path.stat().st_mode & 0o077 == 0 for path in (folder, folder / "captures", *files(folder))
    )
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


def test_nothing_is_kept_where_it_is_turned_off(
    counted: Mock, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPER_CACHE", "")
    piper.compile(job(PLAIN), ONE)
    assert not folder.exists()


def test_the_folder_is_the_users_own_for_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIPER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert (
        kept_captures.kept_folder()
        == user_cache_path("piper", appauthor=False) / "captures" / kept_captures.version()
    )
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError))
    monkeypatch.chdir(tmp_path)
    assert kept_captures.kept_folder() is None, "a user without a home has no folder"
    assert not (tmp_path / "~").exists()


@pytest.mark.long
def test_the_oldest_files_go(
    counted: Mock, again: Callable[[], None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
