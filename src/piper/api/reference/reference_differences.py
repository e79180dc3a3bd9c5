"""Compare a run of a plan with the reference of one device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piper.api.reference.reference import Reference, Tensors

FLOAT64 = 1e-9
"""The tolerance of float64; a correct run is at 1e-13, the mildest wrong one seen at 3e-4."""
FLOAT32 = 2e-5
"""The tolerance of float32: for losses and for gradients under SGD only."""
FLOOR = 1e-3
"""The share of the typical norm below which a tensor's own norm is ignored.

A key bias, for example, has true gradient zero, and the rest is rounding.
"""


@dataclass(frozen=True)
class RunOutcome:
    """Hold the results of a run, in the reference's terms.

    Attributes:
        losses: Per step.
        gradients: By rank, per step, by name.
        states: By rank, by name.
        state_dict: The whole model's.
    """

    losses: Sequence[float]
    gradients: Mapping[int, Sequence[Tensors]]
    states: Mapping[int, Tensors]
    state_dict: Tensors

    @staticmethod
    def of(run: Any) -> RunOutcome:
        """Return the outcome of a run that was made with `gradients=True`."""
        tensors = {
            n: t for n, t in run.state_dict().items() if isinstance(t, Tensor)
        }  # without a module's extra state
        return RunOutcome(run.losses, run.rank_gradients, run.rank_states, tensors)


@dataclass(frozen=True)
class Difference:
    """Describe one value that differs from one device.

    Attributes:
        step: From 0; the number of steps for values after the last.
        what: The kind of value that differs.
        rank: -1 if it is not of one rank.
        name: The tensor's name; empty for a loss.
        problem: The difference, in words.
    """

    step: int
    what: str
    rank: int
    name: str
    problem: str

    def __str__(self) -> str:
        name = f" of {self.name}" if self.name else ""
        place = f" on rank {self.rank}" if self.rank >= 0 else ""
        return f"step {self.step}, {self.what}{name}{place}: {self.problem}"


def differences(
    found: RunOutcome, expected: Reference, tolerance: float = FLOAT64, *, parameters: bool = True
) -> list[Difference]:
    """Return all differences of a run from one device, earliest step first.

    `parameters=False` leaves out values after the last step, as float32 needs it.
    """
    result = _losses(found.losses, expected.losses, tolerance)
    norms = [_norms(want) for want in expected.gradients]
    for rank, steps in found.gradients.items():
        if len(steps) != len(expected.gradients):
            result.append(
                Difference(
                    0,
                    "gradients",
                    rank,
                    "",
                    f"{len(steps)} steps, expected {len(expected.gradients)}",
                )
            )
        for step, (got, want) in enumerate(zip(steps, expected.gradients, strict=False)):
            reached = _reached(got, want, expected.parameters)
            result += _tensors(step, "gradient", rank, reached, want, norms[step], tolerance)
    for step, want in enumerate(expected.gradients):
        seen = {n for steps in found.gradients.values() if step < len(steps) for n in steps[step]}
        result += [
            Difference(step, "gradient", -1, n, "no rank has one") for n in want if n not in seen
        ]
    if parameters:
        result += _final(found, expected, tolerance)
    return sorted(result, key=lambda d: d.step)


def _losses(got: Sequence[float], want: Sequence[float], tolerance: float) -> list[Difference]:
    if len(got) != len(want):
        return [Difference(0, "loss", -1, "", f"{len(got)} losses, expected {len(want)}")]
    pairs = enumerate(zip(got, want, strict=True))
    return [
        Difference(step, "loss", -1, "", f"{a!r}, one device has {b!r}")
        for step, (a, b) in pairs
        if not abs(a - b) <= tolerance * abs(b)
    ]


def _final(found: RunOutcome, expected: Reference, tolerance: float) -> list[Difference]:
    last = len(expected.losses)
    result: list[Difference] = []
    kinds = [
        (what, want, _norms(want))
        for what, want in (("parameter", expected.parameters), ("buffer", expected.buffers))
    ]
    for rank, states in found.states.items():
        for what, want, norms in kinds:
            result += _tensors(
                last,
                what,
                rank,
                {n: t for n, t in states.items() if n in want},
                want,
                norms,
                tolerance,
            )
        # What is trained must be somewhere; its holders are compared one by one above.
    held_names = {n for states in found.states.values() for n in states}
    result += [
        Difference(last, "parameter", -1, n, "no rank holds it")
        for n in sorted(expected.trained - held_names)
    ]
    if found.state_dict.keys() != expected.state_dict.keys():
        wrong = sorted(found.state_dict.keys() ^ expected.state_dict.keys())
        result.append(Difference(last, "state_dict", -1, "", f"names differ: {', '.join(wrong)}"))
    want = expected.state_dict
    return result + _tensors(
        last, "state_dict", -1, found.state_dict, want, _norms(want), tolerance
    )


def _reached(got: Tensors, want: Tensors, parameters: Tensors) -> dict[str, Tensor]:
    """Return gradients without the zeros of parameters that no row reached, for which autograd makes none."""
    return {
        n: g for n, g in got.items() if n in want or n not in parameters or bool(g.count_nonzero())
    }


def typical_norm(norms: Mapping[str, float]) -> float:
    """Return the quadratic mean of norms; 0 for none.

    The median is no measure: if branches begin with weights of zero, most gradients may be zero but for rounding.
    """
    return math.sqrt(sum(norm * norm for norm in norms.values()) / max(1, len(norms)))


def _norms(tensors: Tensors) -> dict[str, float]:
    return {name: _norm(tensor) for name, tensor in tensors.items()}


def _tensors(
    step: int,
    what: str,
    rank: int,
    got: Tensors,
    want: Tensors,
    norms: Mapping[str, float],
    tolerance: float,
) -> list[Difference]:
    """Return the differences between tensors of the same names in `got` and `want`, whose norms are given.

    An error counts relative to the tensor's norm and to the typical norm of all of `want`.
    """
    typical = typical_norm(norms)
    result = []
    for name, a in got.items():
        if name not in want:
            if what == "gradient":
                result.append(Difference(step, what, rank, name, "one device has none"))
            continue
        b = want[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            result.append(
                Difference(
                    step,
                    what,
                    rank,
                    name,
                    f"{a.dtype} {tuple(a.shape)}, one device has {b.dtype} {tuple(b.shape)}",
                )
            )
            continue
        error, allowed = _norm(_wide(a) - _wide(b)), tolerance * (norms[name] + FLOOR * typical)
        if not error <= allowed:
            result.append(
                Difference(
                    step,
                    what,
                    rank,
                    name,
                    f"|a - b| = {error:.3g}, |b| = {norms[name]:.3g}, allowed {allowed:.1g}",
                )
            )
    return result


def _wide(tensor: Tensor) -> Tensor:
    """Return real numbers in float64; `Tensor.double` would drop the imaginary parts of complex ones."""
    return (
        torch.view_as_real(tensor.detach().resolve_conj()).double()
        if tensor.is_complex()
        else tensor.detach().double()
    )


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(_wide(tensor)))
