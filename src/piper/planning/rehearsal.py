"""Rehearse a planned strategy: train a small twin of the model under it in float64, and compare with plain PyTorch.

The twin has the same parts in the same order, and the strategy the same recipes on the same axes, each of two devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from piper import models
from piper.api.problems.job_space import KnownChoices
from piper.api.problems.recipe_calls import RecipeCall
from piper.api.problems.spaces import StrategySpace
from piper.api.reference.verification import VerificationReport, verify_strategy
from piper.models import DecoderConfig, Experts, Latent
from piper_compiler import Strategy, recipes
from piper_ir.ground.mesh import Mesh

MOST_AXES = 3
"""The axes of a twin's mesh; with two devices along each it has at most eight ranks."""
OF_AXIS = {"tp": "tensor_parallel", "cp": "context_parallel", "ep": "expert_parallel"}
"""The recipes that are for one axis."""
REPLICAS = ("dp", "rep", "etp", "ep")
"""The axes along which devices have rows of their own."""
STEPS = 2


@dataclass(frozen=True)
class Rehearsal:
    """Hold the comparisons of twins with one device.

    Attributes:
        reports: one for each mesh that was rehearsed; together they have each pair of axes.
    """

    reports: tuple[VerificationReport, ...]

    @property
    def equal(self) -> bool:
        """Return whether all twins are equal to one device."""
        return all(report.equal for report in self.reports)

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome for programs."""
        return {"equal": self.equal, "text": self.text()}

    def text(self) -> str:
        """Return a sentence, or the first difference."""
        for report in self.reports:
            if not report.equal:
                return f"rehearsed on a small twin: {report.text()}"
        meshes = "; ".join(str(report.strategy.mesh) for report in self.reports)
        tensors = sum(report.tensors for report in self.reports)
        return (
            f"rehearsed on a small twin over {STEPS} steps in float64 ({meshes}): losses, gradients and {tensors} tensors "
            f"are equal to plain PyTorch on one device"
        )


def rehearse(config: DecoderConfig, strategy: Strategy, space: StrategySpace) -> Rehearsal:
    """Train twins of a model under a strategy of a space, and compare each with one device.

    Raises the errors of `compile` and `execute`.
    """
    mesh, calls = space.chosen(KnownChoices(strategy.params))
    used = [axis for axis in mesh.axes if mesh.size(axis) > 1]
    return Rehearsal(tuple(_twin(config, axes, calls) for axes in _subsets(used)))


def _subsets(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield sets of at most three axes that have each pair of axes together."""
    if len(axes) <= MOST_AXES:
        yield tuple(axes)
        return
    missing = {frozenset(pair) for pair in combinations(axes, 2)}
    for chosen in combinations(axes, MOST_AXES):
        pairs = {frozenset(pair) for pair in combinations(chosen, 2)}
        if pairs & missing:
            missing -= pairs
            yield chosen


def _twin(
    config: DecoderConfig, axes: tuple[str, ...], calls: Sequence[RecipeCall]
) -> VerificationReport:
    small = [call for call in (_shrunk(call, axes) for call in calls) if call is not None]
    directives = [directive for call in small for directive in call.directives]
    stages = recipes.stages_of(directives) or 1
    microbatches = next(call.how["microbatches"] for call in small if "microbatches" in call.how)
    rows = 2 ** len({*REPLICAS} & set(axes)) * microbatches
    job = models.job(shrunk_model(config, stages), global_batch=rows)
    return verify_strategy(
        job, Strategy(Mesh(tuple((axis, 2) for axis in axes)), directives), steps=STEPS
    )


def _shrunk(call: RecipeCall, axes: tuple[str, ...]) -> RecipeCall | None:
    """Return a recipe for two devices along each axis; None if none of its axes is there."""
    if call.name in OF_AXIS.values():
        return call if any(OF_AXIS.get(axis) == call.name for axis in axes) else None
    if call.name == "data_parallel":
        return call if {*REPLICAS, "cp"} & set(axes) else None
    if call.name == "offload" and call.how.get("tensors") not in ("optim", "states"):
        return RecipeCall(call.name, {**call.how, "least_mb": 0})
    if call.name == "recomputation":
        first, last = call.how["keep"][0], call.how["keep"][-1]
        return RecipeCall(
            call.name, {**call.how, "keep": (first, last) if "pp" in axes else (first,)}
        )
    if "pp" not in call.how:
        return call
    if "pp" not in axes:
        return RecipeCall("one_f_one_b", {"pp": 1, "microbatches": 2})
    how = {**call.how, "pp": 2, "microbatches": 4}
    if isinstance(
        how.get("at"), tuple
    ):  # boundaries of other stages: the twin has a layer for each of its own
        del how["at"]
    if "chunks" in how:
        how["chunks"] = 2
    return RecipeCall(call.name, how)


def shrunk_model(config: DecoderConfig, stages: int) -> DecoderConfig:
    """Return a model of the same parts that a CPU trains in a second, with a layer for each stage."""
    heads, wide = 4, config.head_dim is not None
    grouped = config.kv_heads not in (None, config.heads)
    dense = min(config.dense_layers, 1)
    changes: dict[str, Any] = {
        "layers": max(stages, 2) + dense,
        "width": 32,
        "heads": heads,
        "kv_heads": (1 if config.kv_heads == 1 else 2) if grouped else None,
        "head_dim": 16 if wide else None,
        "hidden": 48,
        "vocab": 64,
        "length": 32,
        "window": None if config.window is None else 8,
        "dense_layers": dense,
        "mtp": min(config.mtp, 1),
    }
    if config.latent is not None:
        q_rank = None if config.latent.q_rank is None else 16
        changes["latent"] = Latent(q_rank=q_rank, kv_rank=16, nope_dim=8, rope_dim=8, value_dim=8)
    if config.experts is not None:
        changes["experts"] = _shrunk_experts(config.experts)
    return replace(config, **changes)


def _shrunk_experts(experts: Experts) -> Experts:
    groups = min(experts.groups, 2)
    return replace(
        experts,
        number=4,
        top_k=min(experts.top_k, 2),
        hidden=16,
        shared_hidden=16 if experts.shared_hidden else 0,
        groups=groups,
        top_groups=min(experts.top_groups, groups),
    )
