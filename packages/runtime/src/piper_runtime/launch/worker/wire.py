"""Encode messages between ranks over a network as JSON and tensors: reading one runs no code, whoever has sent it.

A message is a length, that many bytes of JSON, and a file of torch.save with the tensors, which is read by
`weights_only`. Records are named, and only records of `_records` are made again.
"""

from __future__ import annotations

import functools
import io
import json
import pickle
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from piper_ir.ground.errors import ExecutionError

LENGTH = 8
"""The number of bytes of the length in front."""


@functools.cache
def _records() -> dict[str, type[Any]]:
    """Return the records that ranks send, by name; the import is late because it imports torch's compiler."""
    from piper_runtime.checkpoint.rank_file import SaveDone
    from piper_runtime.engine.memory import MemoryPoint, MemoryRecord
    from piper_runtime.launch.ground.protocol import Failure
    from piper_runtime.launch.ground.report import RankReport, StepDone
    from piper_runtime.launch.worker.timed_rank import EmulationReport
    from piper_runtime.profile.measure_messages import MessageSample
    from piper_runtime.profile.profiler import ProfileReport
    from piper_runtime.weights.dcp_tensors import SavedBox

    known = (
        EmulationReport, Failure, MemoryPoint, MemoryRecord, MessageSample, ProfileReport, RankReport, SaveDone, SavedBox,
        StepDone,
    )  # fmt: skip
    return {record.__name__: record for record in known}


def encode(message: Any) -> bytes:
    """Return a message as bytes; raise TypeError for all but numbers, texts, tensors, nests and known records."""
    tensors: list[torch.Tensor] = []
    text = json.dumps(_plain(message, tensors)).encode()
    file = io.BytesIO()
    if tensors:
        torch.save(tensors, file)
    return len(text).to_bytes(LENGTH, "big") + text + file.getvalue()


def decode(data: bytes) -> Any:
    """Return the message from `encode`; raise ExecutionError for bytes that are no such message."""
    try:
        end = LENGTH + int.from_bytes(data[:LENGTH], "big")
        rest = data[end:]
        tensors = (
            torch.load(io.BytesIO(rest), weights_only=True, map_location="cpu") if rest else []
        )
        return _made(json.loads(data[LENGTH:end]), tensors)
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        RuntimeError,
        EOFError,
        RecursionError,
        pickle.UnpicklingError,
    ) as e:
        raise ExecutionError(
            f"a message between ranks is not one of Piper's ({type(e).__name__}); are all processes of one "
            f"version, and does nobody else reach MASTER_PORT?"
        ) from e


def _plain(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a value as JSON: a container is an object whose one key names its kind."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case torch.Tensor():
            tensors.append(value)
            return {"tensor": len(tensors) - 1}
        case list() | tuple():
            return {type(value).__name__: [_plain(v, tensors) for v in value]}
        case dict():
            return {"dict": [[_plain(k, tensors), _plain(v, tensors)] for k, v in value.items()]}
    name = type(value).__name__
    if not is_dataclass(value) or _records().get(name) is not type(value):
        raise TypeError(f"a {name} is no part of a message between ranks")
    return {
        "record": [name, {f.name: _plain(getattr(value, f.name), tensors) for f in fields(value)}]
    }


def _made(plain: Any, tensors: list[torch.Tensor]) -> Any:
    if not isinstance(plain, dict):
        if isinstance(plain, list):
            raise ValueError("a list says what it is")
        return plain
    ((kind, of),) = plain.items()
    match kind:
        case "tensor":
            return tensors[of]
        case "list":
            return [_made(v, tensors) for v in of]
        case "tuple":
            return tuple(_made(v, tensors) for v in of)
        case "dict":
            return {_made(k, tensors): _made(v, tensors) for k, v in of}
        case "record":
            name, content = of
            return _records()[name](**{k: _made(v, tensors) for k, v in content.items()})
    raise ValueError(f"{kind!r} is no kind of value")
