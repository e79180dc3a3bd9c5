"""Find the tensors of a file or a folder of weights.

They are safetensors, alone or in shards as Hugging Face has them, or a checkpoint of Piper's or of torch's (DCP).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from piper_ir.ground.errors import JobError
from piper_ir.tools import unread
from piper_runtime.weights.dcp_tensors import DCP_METADATA, dcp_tensors, weights_in
from piper_runtime.weights.marker import MARKER, marked_tensors
from piper_runtime.weights.renaming import FileTensor
from piper_runtime.weights.safetensors_file import StoredTensor, read_header

SUFFIX = ".safetensors"
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def is_weight_file(path: Path) -> bool:
    """Return whether a path is one that `stored_tensors` reads: a folder, or a file by its suffix."""
    return path.suffix == SUFFIX or path.is_dir()


def stored_tensors(path: Path) -> Mapping[str, FileTensor]:
    """Return the tensors of a safetensors file, a Hugging Face folder or a checkpoint by name.

    Raises JobError for anything else, and FormatError for a checkpoint that was changed.
    """
    if not path.exists():
        raise JobError(f"{path}: no such file or folder")
    path = path.absolute()  # ranks may have other working directories
    if not path.is_dir():
        return read_header(path)
    if (path / DCP_METADATA).is_file():
        return (
            weights_in(path, marked_tensors(path)[1])
            if (path / MARKER).is_file()
            else dcp_tensors(path)
        )
    if (path / INDEX).is_file():
        return _indexed(path)
    if (path / WHOLE).is_file():
        return read_header(path / WHOLE)
    present = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
    raise JobError(
        f"{path} has neither {INDEX}, {WHOLE} nor the {DCP_METADATA} of a checkpoint; it has {present}"
    )


def _indexed(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all shards; the index and the headers of the shards must say the same."""
    index = folder / INDEX
    files = _weight_map(index)
    tensors: dict[str, StoredTensor] = {}
    for file in dict.fromkeys(files.values()):
        shard = folder / file
        if not shard.is_file():
            raise JobError(f"{index} names {file!r}, which is not in the folder")
        shard_tensors = read_header(shard)
        for name in shard_tensors.keys() & tensors.keys():
            raise JobError(f"{shard} has {name!r}, and so has {tensors[name].path}")
        tensors |= shard_tensors
        for problem in _disagreements(
            {n for n, f in files.items() if f == file}, set(shard_tensors)
        ):
            raise JobError(f"{index} and {shard} do not agree: {problem}")
    return tensors


def _disagreements(said: set[str], names: set[str]) -> Iterator[str]:
    if said - names:
        yield f"the shard lacks {min(said - names)!r}"
    if names - said:
        yield f"the index does not name {min(names - said)!r}"


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(unread("the index", index, error, "give the whole folder")) from None
    except (ValueError, RecursionError) as error:
        raise JobError(f"{index} is no JSON ({type(error).__name__}: {error})") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise JobError(f"{index} has no weight_map, which gives the file of each tensor")
    for file in weight_map.values():
        if Path(file).name != file:
            raise JobError(f"{index} names {file!r}, which is no file of the folder")
    return weight_map
