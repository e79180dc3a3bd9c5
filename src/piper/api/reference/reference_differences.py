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
            on_one = _OneDevice("gradient", want, norms[step], tolerance)
            result += on_one.differences(step, rank, reached)
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
        _OneDevice(what, want, _norms(want), tolerance)
        for what, want in (("parameter", expected.parameters), ("buffer", expected.buffers))
    ]
    for rank, states in found.states.items():
        for on_one in kinds:
            of_kind = {n: t for n, t in states.items() if n in on_one.tensors}
            result += on_one.differences(last, rank, of_kind)
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
    on_one = _OneDevice("state_dict", want, _norms(want), tolerance)
    return result + on_one.differences(last, -1, found.state_dict)


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


@dataclass(frozen=True)
class _OneDevice:
    """Hold the tensors of one device of one kind.

    Attributes:
        what: The kind, such as "gradient".
        tensors: The tensors by name.
        norms: Their norms.
        tolerance: The error that counts as equal, relative to a tensor's norm and to the typical norm of all of them.
    """

    what: str
    tensors: Tensors
    norms: Mapping[str, float]
    tolerance: float

    def differences(self, step: int, rank: int, tensors: Tensors) -> list[Difference]:
        """Return the differences of a rank's tensors from the ones of the same names."""
        typical = typical_norm(self.norms)
        result = []
        for name, tensor in tensors.items():
            if name in self.tensors:
                problem = self._problem(name, tensor, typical)
            else:
                problem = "one device has none" if self.what == "gradient" else None
            if problem is not None:
                result.append(Difference(step, self.what, rank, name, problem))
        return result

    def _problem(self, name: str, tensor: Tensor, typical: float) -> str | None:
        """Return how a tensor differs; None if it does not."""
        want, norm = self.tensors[name], self.norms[name]
        if tensor.shape != want.shape or tensor.dtype != want.dtype:
            return f"{tensor.dtype} {tuple(tensor.shape)}, one device has {want.dtype} {tuple(want.shape)}"
        error, allowed = (
            _norm(_wide(tensor) - _wide(want)),
            self.tolerance * (norm + FLOOR * typical),
        )
        if error <= allowed:
            return None
        return f"|a - b| = {error:.3g}, |b| = {norm:.3g}, allowed {allowed:.1g}"


def _wide(tensor: Tensor) -> Tensor:
    """Return real numbers in float64; `Tensor.double` would drop the imaginary parts of complex ones."""
    return (
        torch.view_as_real(tensor.detach().resolve_conj()).double()
        if tensor.is_complex()
        else tensor.detach().double()
    )


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(_wide(tensor)))
