"""Torch reads the files of a checkpoint, and anything else that is put there gives one clear message."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from itertools import pairwise
from math import prod
from pathlib import Path
from random import Random
from typing import Any
from zipfile import ZipFile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorProperties

from packages.runtime.tests.chains import chain, run
from packages.runtime.tests.handmade import adamw
from piper_ir.ground.errors import FormatError, JobError, PiperError
from piper_runtime import Checkpoints, Run
from piper_runtime.checkpoint.box_archives import _checksums, write_tensor
from piper_runtime.checkpoint.commits import complete
from piper_runtime.checkpoint.meta import CheckpointMeta
from piper_runtime.checkpoint.rank_file import rank_file, write_boxes
from piper_runtime.checkpoint.rank_tensors import NamedRange, Portion, left_out, saved_portion
from piper_runtime.checkpoint.saved_run import open_checkpoint
from piper_runtime.weights.boxes import boxes_of_range
from piper_runtime.weights.dcp_tensors import DCP_METADATA, read_metadata, read_range
from piper_runtime.weights.marker import MARKER, META, digest_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:.*TypedStorage is deprecated"
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """Return a checkpoint of a pipeline of two stages with tied weights, a frozen parameter and a buffer, and its
    run."""
    folder = tmp_path_factory.mktemp("saved")
    plan, job = chain(pp=2, dp=2, tied=True, optimizer=adamw)
    return folder / "step-00000002", run(plan, job, steps=2, checkpoint=Checkpoints(folder))


@pytest.fixture
def copied(saved: tuple[Path, Run], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[0], tmp_path / "step-00000002"))


def resume(path: Path) -> Run:
    plan, job = chain(pp=2, dp=2, tied=True, optimizer=adamw)
    return run(plan, job, steps=1, resume=path)


def test_torch_loads_every_name_of_the_model(saved: tuple[Path, Run]) -> None:
    path, found = saved
    wanted = found.state_dict()
    state = {"model": {n: torch.full_like(t, -1) for n, t in wanted.items()}}
    dcp.load(state, checkpoint_id=path)
    assert all(torch.equal(t, wanted[n]) for n, t in state["model"].items())
    assert {"frozen", "count", "head", "layers.0"} <= wanted.keys()


def test_torch_converts_all_of_it(saved: tuple[Path, Run], tmp_path: Path) -> None:
    path, found = saved
    dcp_to_torch_save(path, tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    chain(tied=True)[1].model().double().load_state_dict(state["model"])
    assert all(torch.equal(t, found.state_dict()[n]) for n, t in state["model"].items())
    kept = state["optim"]["state"]
    assert kept.keys() == {"head", "layers.1", "layers.2"}
    assert all(
        k.keys() == {"step", "exp_avg", "exp_avg_sq"} and k["step"] == 2 for k in kept.values()
    )
    assert all(k["exp_avg"].shape == (4, 4) and k["exp_avg"].abs().sum() > 0 for k in kept.values())


def test_each_tensor_is_written_once_and_replicas_share_the_writing(
    saved: tuple[Path, Run],
) -> None:
    path, _ = saved
    tensors = open_checkpoint(path).tensors
    places = {
        (b.file, b.at) for key, t in tensors.items() for b in t.boxes if key != "model.layers.0"
    }
    assert len(places) == sum(len(t.boxes) for key, t in tensors.items() if key != "model.layers.0")
    assert tensors["model.layers.0"].boxes[0].at == tensors["model.head"].boxes[0].at, (
        "tied names are one tensor"
    )
    plan, _ = chain(layers=7, pp=1, dp=4, microbatches=1)
    portions = [saved_portion(plan, rank) for rank in range(4)]
    assert sorted(b for p in portions for b in p.buckets) == sorted(b.id for b in plan.buckets)
    assert [p.buffers for p in portions] == [{"count"}, set(), set(), set()]
    assert left_out(plan) == (["frozen"], [])
    assert all(isinstance(p, Portion) for p in portions)


def test_what_a_checkpoint_says_of_its_run(saved: tuple[Path, Run]) -> None:
    meta = open_checkpoint(saved[0]).meta
    assert (meta.step, meta.seed, meta.global_batch, meta.optimizer) == (2, 3, 16, "AdamW")
    assert meta.counters == {"head": 2, "layers.1": 2, "layers.2": 2} and meta.tied == {
        "layers.0": "head"
    }
    assert meta.strategy["mesh"] == {"pp": 2, "dp": 2} and meta.trained == (
        "head",
        "layers.1",
        "layers.2",
    )
    assert meta.versions["torch"] == str(torch.__version__) and [g["lr"] for g in meta.groups] == [
        0.01,
        0.02,
    ]


def test_shards_of_flat_buffers_are_read_by_torch_and_as_other_shards(tmp_path: Path) -> None:
    """Four ranks write a tensor as flat ranges that end anywhere; three others read it."""
    whole = torch.arange(5 * 3 * 4, dtype=torch.float64).view(5, 3, 4)
    edges, boxes = [0, 7, 7, 31, 60], []
    partial = tmp_path / "step-00000000.partial"
    partial.mkdir()
    for rank, (a, b) in enumerate(pairwise(edges)):
        ranges = [NamedRange("model.w", (5, 3, 4), a, 2, b - a)] if a < b else []
        flat = torch.cat([torch.full((2,), -1.0, dtype=torch.float64), whole.view(-1)[a:b]])
        boxes += write_boxes(partial / rank_file(rank), [(flat, ranges)])[0]
    assert len(boxes) > 4 and not (partial / rank_file(1)).exists()
    complete(partial, tmp_path / "step-00000000", CheckpointMeta(0), boxes)
    opened = open_checkpoint(tmp_path / "step-00000000")
    for a, b in ((0, 20), (20, 40), (40, 60), (3, 58)):
        assert torch.equal(
            read_range(opened.path, opened.tensors["model.w"], a, b - a), whole.view(-1)[a:b]
        )
    state = {"model": {"w": torch.zeros_like(whole)}}
    dcp.load(state, checkpoint_id=opened.path)
    assert torch.equal(state["model"]["w"], whole)


TENSORS = {
    "matrix": torch.randn(3, 5),
    "number": torch.tensor(7.0),
    "nothing": torch.zeros(2, 0),
    "narrow": torch.randn(70, 64).bfloat16(),
    "part": torch.arange(60.0)[7:31].view(4, 6),
    "truth": torch.tensor([True, False]),
    "complex": torch.randn(4, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", TENSORS)
def test_an_archive_is_that_of_torch_save_but_for_its_identity(name: str) -> None:
    tensor, ours, theirs = TENSORS[name], io.BytesIO(), io.BytesIO()
    for _ in range(2):  # made, and then known
        ours = io.BytesIO()
        assert write_tensor(ours, tensor)[0] == len(ours.getvalue())
    with _checksums():
        torch.save(tensor.clone(), theirs)
    with ZipFile(ours) as a, ZipFile(theirs) as b:
        assert a.testzip() is None and [(r.filename, r.header_offset) for r in a.infolist()] == [
            (r.filename, r.header_offset) for r in b.infolist()
        ]
        assert {r.filename for r in a.infolist() if a.read(r) != b.read(r.filename)} <= {
            "archive/.data/serialization_id"
        }
    ours.seek(0)
    assert torch.equal(torch.load(ours, weights_only=True), tensor)


def test_scalars_and_tensors_without_elements(tmp_path: Path) -> None:
    partial = tmp_path / "step-00000000.partial"
    partial.mkdir()
    content = [
        (torch.tensor([7]), [NamedRange("model.n", (), 0, 0, 1)]),
        (torch.ones(0), [NamedRange("model.e", (2, 0), 0, 0, 0)]),
    ]
    complete(
        partial, tmp_path / "a", CheckpointMeta(0), write_boxes(partial / rank_file(0), content)[0]
    )
    state = {"model": {"n": torch.tensor(0), "e": torch.ones(2, 0)}}
    dcp.load(state, checkpoint_id=tmp_path / "a")
    opened = open_checkpoint(tmp_path / "a")
    assert (
        state["model"]["n"] == 7 and read_range(opened.path, opened.tensors["model.n"], 0, 1) == 7
    )
    assert read_range(opened.path, opened.tensors["model.e"], 0, 0).numel() == 0


def test_a_checkpoint_of_torch_is_no_checkpoint_of_ours_but_its_metadata_is_read(
    tmp_path: Path,
) -> None:
    state = {
        "model": {"w": torch.ones(2, 3), "half": torch.ones(4, dtype=torch.bfloat16)},
        "epoch": 3,
    }
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    with pytest.raises(
        JobError, match=r"theirs is no checkpoint of Piper's: it has no complete.json"
    ):
        resume(tmp_path / "theirs")
    found = read_metadata((tmp_path / "theirs" / DCP_METADATA).read_bytes(), "theirs")
    assert {k: (t.dtype, t.shape) for k, t in found.items()} == {
        "model.w": ("float32", (2, 3)),
        "model.half": ("bfloat16", (4,)),
    }


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let code that a file smuggles in leave its mark where a test sees it."""
    monkeypatch.chdir(tmp_path)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch piper-was-here",)


class Sneaky:
    def __reduce__(self) -> Any:
        return torch.load, ("x",)


@pytest.mark.parametrize(
    "thing", [Evil(), Sneaky(), eval, pickle.loads, torch.nn.Linear, dcp.load], ids=range(6)
)
def test_metadata_that_names_anything_else_runs_nothing(thing: Any) -> None:
    with pytest.raises(
        FormatError,
        match=r"here is no metadata of a checkpoint, or was changed \(it names .*take another",
    ):
        read_metadata(pickle.dumps(thing), "here")
    assert not Path("piper-was-here").exists()


@pytest.mark.parametrize("thing", [None, 3, {"a": 1}, torch.Size([1]), torch.float32], ids=repr)
def test_metadata_that_is_something_else(thing: Any) -> None:
    with pytest.raises(FormatError, match="is no metadata of a checkpoint"):
        read_metadata(pickle.dumps(thing), "here")


def changed_metadata(path: Path, change: Callable[[Any], None]) -> None:
    """Write metadata that torch would accept, and the sizes that belong to it."""
    metadata = pickle.loads((path / DCP_METADATA).read_bytes())
    change(metadata)
    rewrite(path, DCP_METADATA, pickle.dumps(metadata))


def rewrite(path: Path, name: str, data: bytes) -> None:
    """Write a file with the size and the digest that the marker says, as a stranger may: without checksums."""
    (path / name).write_bytes(data)
    marker = json.loads((path / MARKER).read_text())
    marker["files"][name] = len(data)
    marker["digests"] |= {name: digest_of(data)} if name in marker["digests"] else {}
    marker.pop("checksums", None)
    (path / MARKER).write_text(json.dumps(marker))


def _outside(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../../../etc/passwd"


def _beyond(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.length = 1 << 60


def _huge(metadata: Any) -> None:
    metadata.state_dict_metadata["model.head"].size = torch.Size([1 << 40, 1 << 20])


def _gone(metadata: Any) -> None:
    del metadata.state_dict_metadata["model.head"]


def _no_place(metadata: Any) -> None:
    metadata.storage_data.clear()


def _negative(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.offset = -5


def _other_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["model.head"].properties.dtype = torch.float32


def _no_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["model.head"].properties.dtype = "float64"


def _swapped(metadata: Any) -> None:
    tensors = metadata.storage_data
    first, *_, last = tensors
    tensors[first], tensors[last] = tensors[last], tensors[first]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_outside, "names bytes that no file of the checkpoint has"),
        (_beyond, "names bytes that no file of the checkpoint has"),
        (_negative, "names bytes that no file of the checkpoint has"),
        (_huge, r"has 16 of 1152921504606846976 elements for model.head"),
        (_gone, "has no parameter 'head', which the model has"),
        (_no_place, "was changed"),
        (
            _other_dtype,
            "has parameter 'head' in float32, the model in float64; use the same precision",
        ),
        (_no_dtype, "'model.head' has no dtype"),
        (_swapped, "does not hold .* as the metadata says"),
    ],
)
def test_metadata_that_describes_what_cannot_be(
    change: Callable[[Any], None], says: str, copied: Path
) -> None:
    changed_metadata(copied, change)
    with pytest.raises((FormatError, JobError), match=says):
        resume(copied)


def _shorter(path: Path, name: str) -> None:
    data = (path / name).read_bytes()
    (path / name).write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize("name", [DCP_METADATA, META, "__0_0.distcp"])
def test_a_truncated_or_missing_file_is_named(name: str, copied: Path) -> None:
    _shorter(copied, name)
    with pytest.raises(
        FormatError,
        match=rf"{name} has \d+ bytes, \d+ bytes were written; copy the whole folder again",
    ):
        resume(copied)
    (copied / name).unlink()
    with pytest.raises(FormatError, match=rf"{name} is missing, \d+ bytes were written"):
        resume(copied)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (META, b"{", "not JSON"),
        (META, b"\xff\xfe", "is no text"),
        (
            META,
            b'{"format": "piper-checkpoint", "version": 1, "step": "two"}',
            "step: an integer is expected",
        ),
        (
            META,
            b'{"format": "piper-checkpoint", "version": 1, "step": -2}',
            "step -2 is before the first one",
        ),
        (
            META,
            b'{"format": "piper-checkpoint", "version": 9, "step": 2}',
            "this Piper reads version 1",
        ),
        (META, b'{"format": "piper-checkpoint", "version": 1, "step": 2, "extra": 2}', "extra"),
        (MARKER, b"[]", "a JSON object is expected"),
        (
            MARKER,
            b'{"format": "piper-checkpoint-files", "version": 1, "files": {"../x": 3}}',
            "names of files with their sizes",
        ),
        (
            MARKER,
            b'{"format": "piper-checkpoint-files", "version": 1, "files": {}}',
            "does not list run.json",
        ),
    ],
)
def test_texts_that_are_something_else(name: str, content: bytes, says: str, copied: Path) -> None:
    (copied / MARKER).write_bytes(content) if name == MARKER else rewrite(copied, name, content)
    with pytest.raises(FormatError, match=says):
        resume(copied)


def test_a_file_of_tensors_that_is_a_pickle_of_something_else_runs_nothing(copied: Path) -> None:
    opened = open_checkpoint(copied)
    box = opened.tensors["model.head"].boxes[0]
    data = bytearray((copied / box.file).read_bytes())
    other = io.BytesIO()
    torch.save(Evil(), other)
    at = len(data)
    data += other.getvalue()

    def elsewhere(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == "model.head":
                info.offset, info.length = at, len(other.getvalue())

    rewrite(copied, box.file, bytes(data))
    changed_metadata(copied, elsewhere)
    with pytest.raises(FormatError, match=r"does not hold model.head as it was written"):
        resume(copied)
    assert not Path("piper-was-here").exists()


def test_a_changed_byte_of_a_tensor_is_an_error_of_ours_or_changes_nothing(copied: Path) -> None:
    """torch.load reads over a changed number without a word."""

    def tensors() -> dict[str, torch.Tensor]:
        opened = open_checkpoint(copied)
        return {
            key: read_range(copied, t, 0, prod(t.shape))
            for key, t in opened.tensors.items()
            if "model" in key
        }

    generator, files, good, refused = Random(4), sorted(copied.glob("*.distcp")), tensors(), 0
    for _ in range(80):
        path = generator.choice(files)
        content = path.read_bytes()
        at = generator.randrange(len(content))
        path.write_bytes(
            content[:at] + bytes([content[at] ^ 1 << generator.randrange(8)]) + content[at + 1 :]
        )
        try:
            assert all(torch.equal(t, good[key]) for key, t in tensors().items())
        except FormatError as e:
            assert "as it was written" in str(e) or "as the metadata says" in str(e)
            refused += 1
        path.write_bytes(content)
    assert refused > 5


def test_a_memory_format_that_does_not_exist_is_an_error_of_ours(
    saved: tuple[Path, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed byte can lead to it, and torch's class raises a RuntimeError then."""
    metadata = pickle.loads((saved[0] / DCP_METADATA).read_bytes())
    monkeypatch.setattr(
        TensorProperties,
        "__getstate__",
        lambda self: (self.dtype, self.layout, self.requires_grad, "round", self.pin_memory),
    )
    with pytest.raises(FormatError, match=r"here is no metadata .*memory_format"):
        read_metadata(pickle.dumps(metadata), "here")


@settings(max_examples=60)
@given(st.data())
def test_any_changed_byte_is_an_error_of_ours_or_changes_nothing(
    saved: tuple[Path, Run], data: st.DataObject
) -> None:
    """Metadata with bytes changed, cut and added is refused, or describes tensors; nothing else comes of it."""
    original = (saved[0] / DCP_METADATA).read_bytes()
    changed = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    changed = changed[: data.draw(st.integers(len(changed) // 2, len(changed)))]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = read_metadata(bytes(changed), "here")
    except PiperError as e:
        assert "here is no metadata" in str(e)
    else:
        assert all(boxes_of_range(t.shape, 0, 0) == [] for t in found.values())
