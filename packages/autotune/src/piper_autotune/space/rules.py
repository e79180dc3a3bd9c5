"""Reject candidates before they are compiled, by rules that are sound.

A rejected candidate does not fit, or is slower than a known one. A rule compares lower bounds
(`piper_autotune.space.sketch`): a candidate that does not fit with the choices that save most memory is not tried with
any that save less. A strategy with a user's directives is never pruned, except by its mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from piper_autotune.space.problem import Programs, TuningProblem
from piper_autotune.space.sketch import Sketch, Sketches
from piper_compiler import Strategy
from piper_ir.tools import no_garbage_collection, size_text, time_text

SKIPPED = "skipped"
"""The rule of candidates that the strategy function leaves out itself."""
RULES: Mapping[str, str] = {
    SKIPPED: "strategy(trial) left it out by trial.skip",
    "devices": "the mesh has more ranks than the cluster has devices",
    "rows": "the global batch does not divide into the microbatches and data-parallel replicas",
    "states": "parameters, gradients and optimizer state of a role alone exceed the memory limit: with this "
    "placement no schedule or number of microbatches fits",
    "buckets": "the state and the buckets that one instruction needs whole exceed the memory limit: no schedule "
    "and no number of microbatches fits with buckets as large as these",
    "activations": "the state and what the microbatches in flight keep for backward exceed the memory limit: no "
    "plan with this order holds less",
    "slower": "the compute of the busiest device alone, with the fill and drain of its pipeline, the launches of the "
    "busiest host, or the messages of the busiest stream, take longer than the steps of the best candidates known",
}
"""The meaning of each rule, by name. The bound of compute is found soonest and tried first, that of messages last."""
TOO_MUCH = ("states", "buckets", "activations")
"""The rules that reject for memory."""
MESSAGES = "busiest stream communicates"


@dataclass(frozen=True)
class Pruned:
    """Say why a rule rejects a candidate.

    Attributes:
        period_s: a lower bound of the period; None if the rule does not look.
        device_bytes: a lower bound of the memory; None if the rule does not look.
    """

    rule: str
    reason: str
    period_s: float | None = None
    device_bytes: int | None = None


class PruningRules:
    """Apply the rules to the candidates of a problem."""

    def __init__(self, problem: TuningProblem, programs: Programs) -> None:
        self._problem = problem
        self._sketches = Sketches(problem, programs)

    def check(self, strategy: Strategy, known_s: float = float("inf")) -> Pruned | None:
        """Return the first rule that rejects a strategy, which must beat the period `known_s` to be of use."""
        with no_garbage_collection():
            return self._check(strategy, known_s)

    def _check(self, strategy: Strategy, known_s: float) -> Pruned | None:
        cluster = self._problem.cluster
        if cluster is not None and strategy.mesh.world > cluster.devices:
            has = f"{cluster.name} has {cluster.devices} devices"
            return _pruned("devices", f"{strategy.mesh} has {strategy.mesh.world} ranks, {has}")
        early = self._sketches.early(strategy) if known_s < float("inf") else None
        if early is not None and (slower := self._computing(strategy, early, known_s)):
            return slower
        sketch = self._sketches.sketch(strategy)
        if sketch is None:
            return None
        rows = self._sketches.rows(sketch)
        if rows is None:
            parts = f"{sketch.microbatches} microbatches x {sketch.replicas} replicas"
            return _pruned("rows", f"{self._problem.global_batch} rows do not divide into {parts}")
        if known_s == float("inf"):
            return self._memory(sketch, rows, sharp=True)
        # The bound of compute takes least to find, and that of messages most.
        return (
            self._computing(strategy, sketch, known_s)
            or self._memory(sketch, rows, sharp=False)
            or _slower(known_s, self._sketches.messages_s(sketch, rows), MESSAGES)
        )

    def _computing(self, strategy: Strategy, sketch: Sketch, known_s: float) -> Pruned | None:
        rows = self._sketches.rows(sketch)
        if rows is None:
            return None
        return _slower(known_s, *self._sketches.computing_s(strategy, sketch, rows, known_s))

    def _memory(self, sketch: Sketch, rows: int, sharp: bool) -> Pruned | None:
        """Return the first rule of memory that rejects a sketch; `sharp` bounds say how far it is from fitting.

        While little is known that fits, a search follows these bounds, so that the bounds of all rules count.
        """
        limit = self._problem.memory_limit
        if limit is None:
            return None
        first: Pruned | None = None
        for rule, by_role in self._held(sketch, rows):
            on_device = [
                (self._sketches.on_device(sketch, nbytes, role), role, what)
                for role, (nbytes, what) in by_role.items()
            ]
            needed, role, what = max(on_device, default=(0, "", ""))
            if first is None and needed > limit:
                first = _too_much(rule, role, needed, limit, what)
            elif first is not None and needed > (first.device_bytes or 0):
                first = replace(first, device_bytes=needed)
            if first is not None and not sharp:
                break
        return first

    def _held(
        self, sketch: Sketch, rows: int
    ) -> Iterator[tuple[str, Mapping[str, tuple[int, str]]]]:
        """Yield for each rule of memory the least bytes on every role, and their names."""
        sketches = self._sketches
        kept = "parameters, gradients and optimizer state"
        yield (
            "states",
            {role: (nbytes, kept) for role, nbytes in sketches.state_bytes(sketch).items()},
        )
        whole = f"{kept}, and the buckets that an instruction needs whole"
        yield (
            "buckets",
            {role: (nbytes, whole) for role, nbytes in sketches.bucket_bytes(sketch).items()},
        )
        # A compiled backward makes values again inside of its kernels, so that these bound nothing.
        if sketch.away or self._problem.compiles:
            return
        what = "its state and what {} microbatches of {} rows keep for backward".format
        filled = sketches.filled_bytes(sketch, rows)
        yield (
            "activations",
            {role: (nbytes, what(most, rows)) for role, (nbytes, most) in filled.items()},
        )


def _slower(known_s: float, least: float, what: str) -> Pruned | None:
    """Return the rule "slower" if a lower bound of the seconds of a step is above the known ones."""
    if least <= known_s:
        return None
    text = f"its {what} for {time_text(least)} per step; steps of {time_text(known_s)} are known"
    return _pruned("slower", text, period_s=least)


def _too_much(rule: str, role: str, held: int, limit: int, what: str) -> Pruned:
    more = f"{size_text(held - limit)} more than the limit of {size_text(limit)}"
    text = f"role {role} needs at least {size_text(held)} for {what}, {more}"
    return _pruned(rule, text, device_bytes=held)


def _pruned(
    rule: str, text: str, *, period_s: float | None = None, device_bytes: int | None = None
) -> Pruned:
    return Pruned(rule, f"rule {rule}: {text}", period_s, device_bytes)
