"""Turn a checkpoint's weights into a safetensors file, and such a file into a checkpoint to begin with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from piper_ir.ground.errors import FormatError, JobError, OutputError
from piper_ops import dtype_name
from piper_runtime.checkpoint.commits import complete
from piper_runtime.checkpoint.meta import CheckpointMeta, versions
from piper_runtime.checkpoint.rank_file import rank_file, write_boxes
from piper_runtime.checkpoint.rank_tensors import MODEL, NamedRange, key_path, model_key
from piper_runtime.checkpoint.safetensors_export import ToWrite, write_safetensors
from piper_runtime.checkpoint.saved_run import open_checkpoint
from piper_runtime.checkpoint.settings import complete_checkpoints, partial_folder, step_folder
from piper_runtime.weights.dcp_tensors import read_range
from piper_runtime.weights.marker import MARKER
from piper_runtime.weights.safetensors_file import read_headers

SUFFIX = ".safetensors"
TIED = "tied"
"""The key of the text, as JSON, that lists further names of tied tensors in an exported file."""


def checkpoint_at(path: Path) -> Path:
    """Return the checkpoint at a path, which may hold one and no more; raise JobError otherwise."""
    if path.is_dir() and not (path / MARKER).is_file() and (inside := complete_checkpoints(path)):
        if len(inside) > 1:
            raise JobError(
                f"{path} holds {len(inside)} checkpoints; give one of them, such as {inside[max(inside)]}"
            )
        return inside[max(inside)]
    return path


def convert(source: Path, target: Path) -> str:
    """Convert a checkpoint into a safetensors file, or the other way, and return a line that describes the result.

    The path that ends in ".safetensors" is the file. Raises JobError, FormatError or OutputError.
    """
    if source.suffix == target.suffix == SUFFIX or SUFFIX not in (source.suffix, target.suffix):
        raise JobError(
            f"{source} and {target}: one of them is a checkpoint, the other one a file whose name ends in {SUFFIX}"
        )
    try:
        return (
            import_weights(source, target)
            if source.suffix == SUFFIX
            else export_weights(checkpoint_at(source), target)
        )
    except OSError as e:
        if isinstance(e, OutputError):
            raise
        raise OutputError(
            f"{target} cannot be written: {e.strerror}; choose another place"
        ) from None


def export_weights(source: Path, target: Path) -> str:
    """Write parameters and buffers of a checkpoint by name, each once, into a safetensors file."""
    saved = open_checkpoint(source)
    if target.exists() and not target.is_file():
        raise JobError(f"{target} is there, and is no file; choose another name")
    tensors = []
    for key, tensor in saved.tensors.items():
        path = key_path(key)
        if path[0] == MODEL and path[1] not in saved.meta.tied:
            dtype, read = (
                getattr(torch, tensor.dtype),
                partial(read_range, saved.path, tensor, 0, prod(tensor.shape)),
            )
            tensors.append(ToWrite(path[1], dtype, tensor.shape, read))
    texts = {"format": "pt", "step": str(saved.meta.step)}
    texts |= {TIED: json.dumps(saved.meta.tied)} if saved.meta.tied else {}
    write_safetensors(target, tensors, texts)
    also = "".join(f"; {other} is {first}" for other, first in saved.meta.tied.items())
    return f"{len(tensors)} tensors of step {saved.meta.step} are in {target}{also}"


def import_weights(source: Path, target: Path) -> str:
    """Make a checkpoint of step 0 of the tensors of a safetensors file: a run that resumes from it begins with them."""
    parts, texts = read_headers(source)
    if not parts:
        raise FormatError(f"{source} holds no tensors")
    tied = _tied(source, texts, parts)
    folder = target / step_folder(0)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise JobError(f"{target} is there already; choose a new folder")
    unfinished = target / partial_folder(0)
    unfinished.mkdir(parents=True)
    try:
        boxes = []
        for k, (name, part) in enumerate(parts.items()):
            full_range = NamedRange(model_key(name), part.shape, 0, 0, prod(part.shape))
            boxes += write_boxes(
                unfinished / rank_file(k), [(part.flat(0, full_range.numel), [full_range])]
            )[0]
        complete(unfinished, folder, CheckpointMeta(0, tied=tied, versions=versions()), boxes)
    finally:
        if unfinished.exists():
            shutil.rmtree(unfinished)
    return f"{len(parts)} tensors ({', '.join(sorted({dtype_name(p.dtype) for p in parts.values()}))}) are in {folder}"


def _tied(source: Path, texts: Mapping[str, str], parts: Mapping[str, Any]) -> dict[str, str]:
    """Return the further names of tensors that an exported file tells; files of other programs tell none."""
    try:
        tied = json.loads(texts.get(TIED, "{}"))
        fits = isinstance(tied, dict) and all(
            n not in parts and first in parts for n, first in tied.items()
        )
    except (ValueError, TypeError, RecursionError):
        fits = False
    if not fits:
        raise FormatError(
            f"{source} has a text {TIED!r} that does not name its tensors; take another copy of it"
        )
    return dict(tied)
