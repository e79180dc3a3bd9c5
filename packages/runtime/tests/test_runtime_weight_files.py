"""safetensors files: boxes equal slices, only their bytes are read, and each damaged file is refused by name."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from piper_ir.ground.errors import JobError
from piper_runtime.weights import safetensors_file as module
from piper_runtime.weights import stored_tensors
from piper_runtime.weights.safetensors_file import STORED_DTYPES, read_header, runs
from tests.helpers.cases import each_case
from tests.helpers.safetensors_writer import header_of, write_folder, write_safetensors


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "a": torch.randn(4, 6),
        "b.weight": torch.randn(3, 5, 2).bfloat16(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "c": torch.arange(7),
        "mask": torch.tensor([True, False, True]),
    }


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes of every span that is read."""
    found: list[int] = []
    read = module.read_bytes

    def counted(path: str, spans: Any, into: memoryview) -> None:
        spans = list(spans)
        found.extend(length for _, length in spans)
        read(path, spans, into)

    monkeypatch.setattr(module, "read_bytes", counted)
    yield found


def test_every_box_is_a_slice_of_the_tensor(tmp_path: Path) -> None:
    source = tensors()
    stored = read_header(write_safetensors(tmp_path / "x.safetensors", source, {"format": "pt"}))
    assert list(stored) == list(source)
    generator = random.Random(1)
    for name, tensor in source.items():
        assert torch.equal(stored[name].flat(0, tensor.numel()).view(tensor.shape), tensor)
        for _ in range(30):
            start, stop = sorted(generator.choices(range(tensor.numel() + 1), k=2))
            assert torch.equal(stored[name].flat(start, stop), tensor.reshape(-1)[start:stop])
            bounds = [sorted(generator.choices(range(n + 1), k=2)) for n in tensor.shape]
            box = stored[name].box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))
            assert torch.equal(box, tensor[tuple(slice(a, b) for a, b in bounds)]), (name, bounds)


def test_a_box_is_read_in_as_few_spans_as_it_has() -> None:
    assert list(runs((4, 6), (1, 0), (2, 6))) == [(6, 18)]
    assert list(runs((4, 6), (1, 2), (2, 3))) == [(8, 11), (14, 17)]
    assert list(runs((2, 3, 5), (0, 1, 0), (2, 2, 5))) == [(5, 15), (20, 30)]
    assert list(runs((), (), ())) == [(0, 1)] and list(runs((2, 3), (0, 0), (2, 0))) == []


def test_only_the_bytes_of_a_box_are_read(tmp_path: Path, count: list[int]) -> None:
    big = torch.arange(1000 * 64).view(1000, 64)
    stored = read_header(write_safetensors(tmp_path / "x.safetensors", {"other": big, "big": big}))
    count.clear()
    assert torch.equal(stored["big"].flat(640, 1280), big.view(-1)[640:1280])
    assert torch.equal(stored["big"].box((10, 4), (5, 8)), big[10:15, 4:12])
    assert sum(count) == 8 * (640 + 5 * 8)


@each_case("name", STORED_DTYPES)
def test_every_dtype_of_the_format(name: str, tmp_path: Path) -> None:
    dtype = STORED_DTYPES[name]
    tensor = torch.tensor([0, 1, 2, 3]).to(dtype)
    stored = read_header(write_safetensors(tmp_path / "x.safetensors", {"t": tensor}))["t"]
    assert stored.dtype == dtype and torch.equal(
        stored.flat(1, 3).view(torch.uint8), tensor[1:3].view(torch.uint8)
    )


def test_a_folder_has_the_tensors_of_its_shards(tmp_path: Path) -> None:
    source = tensors()
    found = stored_tensors(write_folder(tmp_path / "model", source, shards=3))
    assert found.keys() == source.keys()
    assert all(torch.equal(found[n].flat(0, t.numel()).view(t.shape), t) for n, t in source.items())
    (tmp_path / "one").mkdir()
    write_safetensors(tmp_path / "one" / "model.safetensors", source)
    assert stored_tensors(tmp_path / "one").keys() == source.keys()


def change_index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        changed = change(content)
        index.write_text(json.dumps(content if changed is None else changed))

    return damage


@each_case(
    ("damage", "says"),
    [
        (
            lambda f: (f / "model-00002-of-00002.safetensors").unlink(),
            "names 'model-00002.*not in the folder",
        ),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), "index.json is no JSON"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text("[" * 100_000),
            "index.json is no JSON .RecursionError",
        ),
        (change_index(lambda c: []), "has no weight_map"),
        (change_index(lambda c: {"weight_map": {}}), "has no weight_map"),
        (change_index(lambda c: {"weight_map": {"a": 3}}), "has no weight_map"),
        (
            change_index(lambda c: c["weight_map"].update(a="../x.safetensors")),
            "which is no file of the folder",
        ),
        (
            change_index(lambda c: c["weight_map"].update(more="model-00001-of-00002.safetensors")),
            "the shard lacks 'more'",
        ),
        (change_index(lambda c: c["weight_map"].pop("a") and None), "the index does not name 'a'"),
        (
            change_index(lambda c: c["weight_map"].update(a="model-00002-of-00002.safetensors")),
            "do not agree",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").unlink(),
            "has neither .* it has model-00001",
        ),
    ],
)
def test_damaged_folders_are_refused_by_name(
    damage: Callable[[Path], Any], says: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "model", tensors())
    stored_tensors(folder)
    damage(folder)
    with pytest.raises(JobError, match=says):
        stored_tensors(folder)


def changed_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    new = change(header)
    text = json.dumps(header if new is None else new).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def entry(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["a"].update(fields)


FIT, PARSED = "invalid shape, data type, or offset", "invalid JSON in header"
DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no object": (lambda h: [h], f"{PARSED}: invalid type: sequence"),
    "unknown dtype": (entry(dtype="F31"), "unknown variant `F31`, expected one of"),
    "dtype no text": (entry(dtype=["F32"]), f"{PARSED}: invalid type: sequence, expected string"),
    "other width": (entry(dtype="F64"), FIT),
    "other shape": (entry(shape=[4, 7]), FIT),
    "negative shape": (entry(shape=[-4, -6]), "invalid value: integer `-4`"),
    "shape of floats": (entry(shape=[4.0, 6]), "invalid type: floating point `4.0`"),
    "shape of bools": (entry(shape=[True, 24]), "invalid type: boolean `true`"),
    "no shape": (lambda h: h["a"].pop("shape") and None, "missing field `shape`"),
    "no entry": (lambda h: h.update(a=None), "invalid type: null"),
    "offsets reversed": (entry(data_offsets=[96, 0]), "invalid offset for tensor `a`"),
    "three offsets": (entry(data_offsets=[0, 96, 96]), "invalid length 3, expected 2 elements"),
    "huge offsets": (entry(data_offsets=[0, 10**30]), "invalid type: floating point"),
    "beyond the file": (entry(data_offsets=[10**9, 10**9 + 96]), "invalid offset for tensor"),
    "overlap": (entry(data_offsets=[8, 104]), "invalid offset for tensor `a`"),
    "left out": (lambda h: h.pop("a") and None, "invalid offset for tensor `b.weight`"),
    "last left out": (lambda h: h.pop("mask") and None, "file not fully covered"),
    "metadata of numbers": (lambda h: h.update(__metadata__={"format": 1}), "expected a string"),
    "metadata a text": (lambda h: h.update(__metadata__="pt"), "expected a map"),
    "other dtype than torch's": (
        lambda h: h["a"].update(dtype="F8_E8M0", shape=[4, 24]),
        "has 'a' in dtype F8_E8M0; known are F64, F32",
    ),
}


@each_case("name", DAMAGES)
def test_damaged_headers_are_refused_by_name(name: str, tmp_path: Path) -> None:
    change, says = DAMAGES[name]
    path = write_safetensors(tmp_path / "x.safetensors", tensors())
    read_header(path)
    changed_header(path, change)
    with pytest.raises(JobError, match=says) as caught:
        read_header(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@each_case(
    ("content", "says"),
    [
        (b"", "header too small"),
        (b"1234567", "header too small"),
        (b"\xff" * 8, "header too large"),
        ((2).to_bytes(8, "little") + b"{", "invalid header length"),
        ((4).to_bytes(8, "little") + b"\xff\xfe{}", "invalid UTF-8 in header"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "invalid JSON in header"),
        ((12).to_bytes(8, "little") + b'{"a":1,"a":2}'[:12], "invalid JSON in header: EOF"),
        ((2).to_bytes(8, "little") + b"{}more", "file not fully covered"),
    ],
)
def test_other_files_are_refused_by_name(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(JobError, match=rf"x\.safetensors is no safetensors file: .*{says}"):
        read_header(path)


def fuzzed(content: bytes, generator: random.Random, length: int) -> bytes:
    """The file with one damage that no reader may overlook: the bytes of tensors have none such, so they stay."""
    at = generator.randrange(8 + length)
    match generator.randrange(5):
        case 0:  # a bit of the length or of the header
            return (
                content[:at]
                + bytes([content[at] ^ (1 << generator.randrange(8))])
                + content[at + 1 :]
            )
        case 1:  # the file ends early
            return content[: generator.randrange(len(content))]
        case 2:  # a byte more, anywhere but in a text
            return content + bytes(generator.randrange(1, 9))
        case 3:  # a part of the header is missing
            return content[:at] + content[at + generator.randrange(1, 9) :]
        case _:  # noise instead of the header
            return content[:8] + generator.randbytes(length) + content[8 + length :]


def test_two_hundred_damaged_files_give_two_hundred_clear_errors(tmp_path: Path) -> None:
    source = tensors()
    path = write_safetensors(tmp_path / "x.safetensors", source)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    generator = random.Random(2)
    refused = 0
    for _ in range(400):
        path.write_bytes(fuzzed(content, generator, length))
        try:
            found = read_header(path)
        except JobError as error:
            assert str(path) in str(error) and len(str(error)) < 800 + len(str(path)), error
            assert str(error).isprintable(), error
            refused += 1
            continue
        # What reads as a file says something else than the old one, which the model then refuses, or the same.
        same = {n: (s.dtype, s.shape) for n, s in found.items()} == {
            n: (t.dtype, tuple(t.shape)) for n, t in source.items()
        }
        assert (
            same
            or found.keys() != source.keys()
            or any(found[n].dtype != t.dtype for n, t in source.items())
        )
    assert refused >= 300


def test_a_file_that_changes_after_its_header_was_read_is_named(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", tensors())
    stored = read_header(path)
    os.truncate(path, path.stat().st_size - 40)
    with pytest.raises(JobError, match=r"x\.safetensors ends early"):
        stored["c"].flat(0, 7)
    path.unlink()
    with pytest.raises(JobError, match=r"cannot read the weights .*no such file.*every machine"):
        stored["c"].flat(0, 7)


def test_the_writer_of_these_tests_writes_what_the_format_says() -> None:
    assert header_of({"a": torch.zeros(2, 3), "b": torch.zeros(4).bfloat16()}) == {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    }
