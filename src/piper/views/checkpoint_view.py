"""Show the checkpoints of a folder, or the content of one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from piper_ir.ground.errors import JobError
from piper_ir.ground.sizes import ITEM_BYTES
from piper_ir.tools import count_text, size_text
from piper_report import Table
from piper_runtime.checkpoint import SavedRun, complete_checkpoints, open_checkpoint


def opened(path: Path) -> list[SavedRun]:
    """Return the checkpoint at a path, or all complete ones of a folder, oldest first; raise JobError without any."""
    inside = complete_checkpoints(path) if path.is_dir() else {}
    if path.is_dir() and not inside and any(p.name.startswith("step-") for p in path.iterdir()):
        raise JobError(
            f"{path} holds no complete checkpoint, only what killed runs have left; give another folder"
        )
    return [open_checkpoint(p) for p in inside.values()] or [open_checkpoint(path)]


def checkpoint_facts(saved: SavedRun) -> dict[str, Any]:
    """Return the facts of a checkpoint, of its run and of its tensors, for programs."""
    tensors = {key: {"dtype": t.dtype, "shape": list(t.shape)} for key, t in saved.tensors.items()}
    return {
        "path": str(saved.path),
        "bytes": disk_bytes(saved),
        **asdict(saved.meta),
        "tensors": tensors,
    }


def disk_bytes(saved: SavedRun) -> int:
    """Return the bytes of a checkpoint's files."""
    return sum(p.stat().st_size for p in saved.path.iterdir())


def folder_table(found: list[SavedRun]) -> Table:
    """Return a table with a row for each checkpoint."""
    rows = tuple(
        (
            s.path.name,
            str(s.meta.step),
            _strategy(s),
            s.meta.optimizer or "-",
            size_text(disk_bytes(s)),
        )
        for s in found
    )
    return Table(
        f"checkpoints in {found[0].path.parent}",
        ("", "steps done", "saved by", "optimizer", "on disk"),
        rows,
    )


def checkpoint_table(saved: SavedRun) -> Table:
    """Return a table with a row for each parameter and buffer of a checkpoint, with the facts of its run below."""
    meta, model = (
        saved.meta,
        {k.removeprefix("model."): t for k, t in saved.tensors.items() if k.startswith("model.")},
    )
    rows = []
    for name, t in model.items():
        first, count = meta.tied.get(name), meta.counters.get(name)
        kind = f"tied to {first}" if first else "trained" if name in meta.trained else "-"
        size = size_text(prod(t.shape) * ITEM_BYTES[t.dtype]) if t.dtype in ITEM_BYTES else "-"
        shape, steps = (
            " x ".join(map(str, t.shape)) or "number",
            "-" if count is None else f"{count:g}",
        )
        rows.append((name, shape, t.dtype, size, kind, steps))
    columns = ("", "shape", "dtype", "bytes", "", "optimizer steps")
    return Table(
        f"{saved.path}: after {count_text(meta.step, 'step')}",
        columns,
        tuple(rows),
        tuple(_about(saved)),
    )


def _about(saved: SavedRun) -> list[str]:
    meta = saved.meta
    lines = [
        f"{size_text(disk_bytes(saved))} on disk; saved by {_strategy(saved)}; {_versions(meta.versions)}"
    ]
    if meta.seed is not None:
        rates = ", ".join(
            f"{g['lr']:g}" for g in meta.groups if isinstance(g.get("lr"), int | float)
        )
        schedule = f", schedule {meta.schedule}" if meta.schedule else ""
        what = f"{meta.optimizer}{schedule}, learning rates now: {rates or '-'}"
        lines.append(f"seed {meta.seed}, global batch {meta.global_batch}; {what}")
    if meta.data:
        lines.append(f"data: {meta.data.get('fingerprint')}")
    return lines


def _strategy(saved: SavedRun) -> str:
    of = saved.meta.strategy
    mesh = of.get("mesh")
    if not isinstance(mesh, Mapping):
        return "-"
    return (
        f"{' x '.join(f'{axis} {n}' for axis, n in mesh.items()) or 'one device'}, "
        f"{of.get('microbatches')} microbatches"
    )


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
