"""Safetensors files: what is written is read again, and anything else is one clear message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from packages.runtime.tests.chains import chain, run
from packages.runtime.tests.handmade import adamw
from piper_ir.ground.errors import FormatError, JobError, OutputError
from piper_runtime import Checkpoints
from piper_runtime.checkpoint.converting import convert
from piper_runtime.checkpoint.safetensors_export import ToWrite, write_safetensors
from piper_runtime.checkpoint.saved_run import open_checkpoint
from piper_runtime.weights.safetensors_file import STORED_DTYPES, read_headers

TENSORS = {
    "w": torch.arange(6, dtype=torch.float64).view(2, 3),
    "half": torch.randn(3, 3).to(torch.bfloat16),
    "flag": torch.tensor([True, False]),
    "number": torch.tensor(7),
    "none": torch.ones(0, 4),
    "small": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
}


def written(path: Path, tensors: dict[str, torch.Tensor] = TENSORS, **texts: str) -> Path:
    write_safetensors(
        path,
        [ToWrite(n, t.dtype, tuple(t.shape), lambda t=t: t) for n, t in tensors.items()],
        texts,
    )
    return path


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    parts, texts = read_headers(written(tmp_path / "a.safetensors", format="pt"))
    assert texts == {"format": "pt"} and parts.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        found = parts[name].flat(0, tensor.numel())
        assert found.dtype == tensor.dtype and parts[name].shape == tuple(tensor.shape)
        assert torch.equal(found.view(tensor.shape).float(), tensor.float()), name
        assert tensor.numel() == 0 or parts[name].start % tensor.dtype.itemsize == 0, "aligned"
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_the_bytes_are_those_of_the_format(tmp_path: Path) -> None:
    """Restated from its description: the length, the header, and behind it the bytes."""
    data = written(tmp_path / "a.safetensors", {"w": TENSORS["w"]}).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0 and header["w"] == {
        "dtype": "F64",
        "shape": [2, 3],
        "data_offsets": [0, 48],
    }
    assert torch.frombuffer(bytearray(data[8 + length :]), dtype=torch.float64).tolist() == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]


def test_a_dtype_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        JobError, match=r"w is torch.complex128, which safetensors files do not know; known are F64"
    ):
        written(tmp_path / "a.safetensors", {"w": torch.ones(1, dtype=torch.complex128)})
    assert set(STORED_DTYPES.values()) >= {torch.float32, torch.bfloat16, torch.float64}


def test_a_checkpoint_goes_out_and_comes_in_again(tmp_path: Path) -> None:
    """Tied names are written once; a run that begins with the file is one that begins with the weights."""
    plan, job = chain(pp=2, tied=True, optimizer=adamw)
    run(plan, job, steps=2, checkpoint=Checkpoints(tmp_path / "c"))
    file = tmp_path / "w.safetensors"
    assert convert(tmp_path / "c", file) == f"5 tensors of step 2 are in {file}; layers.0 is head"
    parts, texts = read_headers(file)
    assert parts.keys() == {"head", "layers.1", "layers.2", "frozen", "count"} and json.loads(
        texts["tied"]
    ) == {"layers.0": "head"}
    convert(file, tmp_path / "begin")
    assert open_checkpoint(tmp_path / "begin" / "step-00000000").weights_only
    found = run(plan, job, steps=2, checkpoint=Checkpoints(tmp_path / "begin"), resume="latest")
    state = run(plan, job, steps=2).state_dict()
    torch.save(state, tmp_path / "w.pt")
    wanted = run(plan, chain(pp=2, tied=True, optimizer=adamw, init=tmp_path / "w.pt")[1], steps=2)
    assert found.losses == wanted.losses and found.first_step == 0
    assert all(torch.equal(t, wanted.state_dict()[n]) for n, t in found.state_dict().items())


def test_conversions_that_cannot_be(tmp_path: Path) -> None:
    file = written(tmp_path / "a.safetensors")
    with pytest.raises(
        JobError,
        match=r"one of them is a checkpoint, the other one a file whose name ends in .safetensors",
    ):
        convert(file, tmp_path / "b.safetensors")
    with pytest.raises(JobError, match=r"nowhere: there is no such folder"):
        convert(tmp_path / "nowhere", tmp_path / "b.safetensors")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(JobError, match="is there already; choose a new folder"):
        convert(file, tmp_path / "full")
    with pytest.raises(FormatError, match="has a text 'tied' that does not name its tensors"):
        convert(written(tmp_path / "t.safetensors", tied='{"a": "b"}'), tmp_path / "new")
    plan, job = chain(pp=1, microbatches=1)
    run(plan, job, steps=1, checkpoint=Checkpoints(tmp_path / "c"))
    with pytest.raises(
        OutputError, match=r"cannot be written: No such file or directory; choose another place"
    ):
        convert(tmp_path / "c", tmp_path / "no" / "folder" / "b.safetensors")
    convert(file, tmp_path / "begin")
    with pytest.raises(JobError, match="has no parameter 'head', which the model has"):
        run(plan, job, checkpoint=Checkpoints(tmp_path / "begin"), resume="latest")
