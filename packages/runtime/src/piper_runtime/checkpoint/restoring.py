"""Bring a rank to a saved state: read the boxes that overlap its tensors, from the files of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from piper_ir.ground.errors import FormatError, JobError
from piper_ir.plan.plan import Bucket, Plan
from piper_runtime.checkpoint.rank_tensors import (
    MODEL,
    FlatState,
    NamedRange,
    in_line,
    kept_keys,
    key_path,
    left_out,
    model_key,
    optimizer_key,
    rank_tensors,
    saved_dtypes,
)
from piper_runtime.checkpoint.saved_run import SavedRun
from piper_runtime.checkpoint.snapshot_files import CopiedTensor, HostSnapshot
from piper_runtime.rank.binding.rank_state import RankState
from piper_runtime.rank.optimizers.optimizer import OptimizerState
from piper_runtime.weights.dcp_tensors import DcpTensor, read_range


@dataclass(frozen=True)
class Restore:
    """Hold the source of a rank's restored state.

    Attributes:
        folder: the checkpoint, or the folder of host snapshots.
        tensors: the places of the tensors that the rank needs.
        numbers: the optimizer's state beside tensors, by name.
        groups: the settings of the optimizer's groups.
        loss_scale: the scale of the loss, see `RunningScale.state`; empty if it was not scaled.
        weights_only: whether there is no optimizer state, since no step was done.
        group_of: the group of each parameter; empty if they are as now.
    """

    folder: str
    tensors: Mapping[str, DcpTensor | CopiedTensor]
    numbers: Mapping[str, Any]
    groups: tuple[Mapping[str, Any], ...] = ()
    weights_only: bool = False
    loss_scale: Mapping[str, float] = field(default_factory=dict)
    group_of: Mapping[str, int] = field(default_factory=dict)


def restore_of(saved: SavedRun | HostSnapshot, names: Collection[str]) -> Restore:
    """Return the part of a saved state for ranks that hold the parameters and buffers of these names."""
    wanted = {*names}
    if isinstance(saved, HostSnapshot):
        copied = {key: t for key, t in saved.tensors.items() if _name(key) in wanted}
        numbers = _of_names(saved.numbers, wanted)
        return Restore(
            str(saved.folder), copied, numbers, saved.groups, loss_scale=saved.loss_scale
        )
    folder = str(saved.path)
    tensors = {
        key: DcpTensor(folder, t) for key, t in saved.tensors.items() if _name(key) in wanted
    }
    return Restore(
        folder,
        tensors,
        _of_names(saved.meta.numbers, wanted),
        saved.meta.groups,
        saved.weights_only,
        saved.meta.loss_scale,
        saved.meta.group_of,
    )


def _of_names(numbers: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Any]:
    return {key: n for key, n in numbers.items() if _name(key) in wanted}


def _name(key: str) -> str:
    """Return the parameter or buffer that a name in a checkpoint belongs to."""
    path = key_path(key)
    return path[-1] if path[0] == MODEL else path[-2]


def unheld_tensors(saved: SavedRun, plan: Plan) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a checkpoint that no rank of a plan holds, by name.

    They are read at once: the checkpoint may be deleted before the run ends.
    """
    names = {name: saved.tensors.get(model_key(name)) for kind in left_out(plan) for name in kind}
    dtypes = saved_dtypes(plan)
    unheld = {}
    for name, tensor in names.items():
        if tensor is not None:
            value = read_range(saved.path, tensor, 0, prod(tensor.shape)).view(tensor.shape)
            unheld[name] = value.to(getattr(torch, dtypes[name])) if name in dtypes else value
    return unheld


def restore(
    rank: RankState, saved: Restore, beat: Callable[[int], object] = lambda n: None
) -> None:
    """Give a rank the parameters, buffers and optimizer state that are saved; tell `beat` how many tensors are read.

    Raises JobError when the state does not fit its optimizer, and FormatError when it cannot be read.
    """
    with torch.no_grad():
        if not saved.weights_only:
            kept = kept_keys([*saved.tensors, *saved.numbers])
            for bucket in rank.store.buckets:
                _make_states(rank, bucket, saved, kept)
            _restore_groups(rank, saved)
        if rank.loss_scale is not None:
            rank.loss_scale.load(saved.loss_scale)
        for read, state in enumerate(rank_tensors(rank)):
            beat(read)
            _fill(state, saved)
        rank.store.copy_masters([bucket.id for bucket in rank.store.buckets])
        for name, exact in rank.store.exact.items():
            rank.store.params[name].copy_(exact)


def _fill(state: FlatState, saved: Restore) -> None:
    folder, before = Path(saved.folder), None
    for together in in_line(state.ranges):
        first = together[0]
        if first.key not in saved.tensors:
            if saved.weights_only:
                continue  # the optimizer begins, and a buffer is as the model makes it
            raise FormatError(f"{folder} does not hold {first.key}; take another checkpoint")
        values = _fitting(first, saved).flats([part.span for part in together])
        if state.shared and before is not None and not torch.equal(values, before):
            raise JobError(
                f"{folder}: the optimizer has made {values.item():g} steps on {first.key} and {before.item():g} on "
                f"{state.ranges[0].key}, which this run would keep in one bucket; give them parameter groups of "
                f"their own"
            )
        before = values
        state.tensor[first.offset : first.offset + values.numel()].copy_(values)


def _fitting(found: NamedRange, saved: Restore) -> DcpTensor | CopiedTensor:
    tensor = saved.tensors[found.key]
    if tensor.shape != found.shape:
        raise JobError(
            f"{saved.folder}: {found.key} has shape {list(tensor.shape)}, here it has {list(found.shape)}"
        )
    return tensor


def _make_states(
    rank: RankState, bucket: Bucket, saved: Restore, kept: Mapping[str, set[str]]
) -> None:
    """Make the state that the optimizer makes in its first step, if it does not exist yet; `_fill` fills it."""
    for of in rank.optimizer.states(bucket):
        group = rank.optimizer.groups[bucket.group]
        for name in of.names:
            saved_keys = kept.get(name, set())
            for key in saved_keys - of.state.keys():
                whole = optimizer_key(name, key)
                if whole in saved.numbers:
                    of.state[key] = saved.numbers[whole]
                elif of.flat and key not in rank.optimizer.scalars(bucket):
                    of.state[key] = torch.zeros_like(of.tensor, dtype=saved.tensors[whole].dtype)
                else:
                    of.state[key] = _zeros(saved.tensors[whole], of, key, group)


def _zeros(
    saved: DcpTensor | CopiedTensor, of: OptimizerState, key: str, group: Mapping[str, Any]
) -> torch.Tensor:
    """Return zeros for a saved tensor: on the parameter's device, or on the CPU for torch's step counters."""
    counter = key == "step" and not (group.get("capturable") or group.get("fused"))
    device = torch.device("cpu") if counter else of.tensor.device
    return torch.zeros(saved.shape, dtype=saved.dtype, device=device)


def _restore_groups(rank: RankState, saved: Restore) -> None:
    """Take over the state that an optimizer keeps in its groups; the settings are the job's, and the schedule's."""
    before = {
        bucket.group: saved.group_of.get(name, bucket.group)
        for bucket in rank.store.buckets
        for name in bucket.params
    }
    groups = zip(rank.optimizer.job_settings, rank.optimizer.groups, strict=True)
    for index, (given, group) in enumerate(groups):
        place = before.get(index, index)
        if given is not None and place < len(saved.groups):
            kept = {k: v for k, v in saved.groups[place].items() if k not in given}
            group.update({key: _as_before(group.get(key), value) for key, value in kept.items()})


def _as_before(now: Any, value: Any) -> Any:
    """Return a setting with the type that it has now: JSON makes lists of tuples."""
    return tuple(value) if isinstance(now, tuple) else value
