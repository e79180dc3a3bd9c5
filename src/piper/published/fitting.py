"""Fit the constants of a software stack to published runs.

The residual of a run is the logarithm of predicted over measured. Constants move on a logarithmic scale too, but for
the share of hidden messages. The derivative of each residual by each constant is found by changing it a little and
predicting again. Then least squares give the change, with weights 1 / max(5 %, |residual|), so that a run that nothing
explains does not drag the others; each constant is drawn to its prior with the weight of a run of RIDGE, and stays
within its physical range. That is repeated ROUNDS times.

Nothing is fitted per run or per source. A fit needs LEAST_ROWS runs of LEAST_MODELS models.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from piper.published.scoring import RunPrediction
from piper.published.table import PublishedRow
from piper_ir.ground.errors import JobError, PiperWarning
from piper_simulator import Stack, StackConstant

LEAST_ROWS, LEAST_MODELS = 5, 2
NOISE, RIDGE, ROUNDS, STEP = 0.05, 0.15, 3, 0.05
"""The numbers of a fit, in this order.

They are the residual below which runs weigh the same, the usual distance of a constant from its prior, the repetitions,
and the change by which derivatives are taken.
"""
FAR = 3.0
"""The factor between measured and predicted seconds from which a row is doubted."""
APART = 1.1
"""The factor between the steps of equal runs from which these are said."""
OF_ONE_RUN = frozenset({"case", "source", "note", "step_s", "peak_gib"})
"""The columns that name a run or measure it; all others describe its configuration."""
LINEAR = frozenset({"hidden"})
"""The constants that may be 0, whose change is not a factor."""
Predictor = Callable[[Sequence[PublishedRow], Stack], Sequence[RunPrediction]]
"""A function that predicts runs under a stack."""


@dataclass(frozen=True)
class Fit:
    """Hold a fitted stack.

    Attributes:
        stack: with the fitted values, and the errors that four in five runs have at most as its half width (`seen`).
        rows: the runs that it was fitted to.
        before: mean of the absolute errors before the fit.
        after: and after it.
        by_runs: free constant -> the share of its value that the runs decide, and not its prior: 1 less its variance
            after the fit over the one before (the diagonal of a ridge's resolution matrix).
    """

    stack: Stack
    rows: tuple[PublishedRow, ...]
    before: float
    after: float
    by_runs: Mapping[str, float]

    @property
    def source(self) -> str:
        """Return where fitted values come from, in words."""
        names = "\n".join(sorted(r.case for r in self.rows))
        digest = hashlib.blake2b(names.encode(), digest_size=4).hexdigest()
        return f"fitted to {len(self.rows)} runs ({digest}), mean error {self.before:.1%} before and {self.after:.1%} after"


def fit(rows: Sequence[PublishedRow], stack: Stack, free: Sequence[str], predict: Predictor) -> Fit:
    """Return a stack with constants that fit runs.

    Args:
        rows: The runs; all have a measured step.
        stack: The stack from whose values the fit starts.
        free: The names of the constants that may change.
        predict: Predicts runs under a stack with other constants.

    Raises:
        JobError: too few runs or models, a constant that the stack lacks, a run that cannot be predicted, or
            more than half that no values of the constants come near.
    """
    rows = [r for r in rows if r.step_s is not None]
    models = {(r.hidden, r.ffn, r.layers, r.arch, r.experts) for r in rows}
    if len(rows) < LEAST_ROWS or len(models) < LEAST_MODELS:
        raise JobError(
            f"a stack is fitted to at least {LEAST_ROWS} runs of {LEAST_MODELS} models; these are {len(rows)} runs of "
            f"{len(models)}: add runs, or take the priors of {stack.name} as they are"
        )
    free = list(dict.fromkeys(free))
    unknown = [name for name in free if name not in stack.constants]
    if unknown or not free:
        raise JobError(
            f"--free {', '.join(unknown or free)}: the stack {stack.name} has the constants {', '.join(stack.constants)}"
        )
    if fixed := [n for n in free if stack.constants[n].low == stack.constants[n].high]:
        raise JobError(
            f"--free {fixed[0]}: its low and high are the same, so that it cannot change"
        )
    start = _residuals(rows, stack, predict)
    derivatives = np.zeros((len(rows), len(free)))
    for k, name in enumerate(free):
        one = stack.constants[name]
        moved = _moved(one, STEP)
        changed = _residuals(rows, _with(stack, {name: moved}), predict)
        derivatives[:, k] = (changed - start) / (_scale(name, moved) - _scale(name, one.value))
    fitted, residuals = stack, start
    for _ in range(ROUNDS):
        fitted = _step(fitted, free, residuals, derivatives)
        residuals = _residuals(rows, fitted, predict)
    _check_near(rows, residuals)
    errors = [np.abs(np.expm1(r)) for r in (start, residuals)]
    before, after = (float(np.mean(e)) for e in errors)
    seen = max(0.01, math.ceil(100 * float(np.quantile(errors[1], 0.8))) / 100)
    by_runs = dict(zip(free, _resolution(derivatives, residuals), strict=True))
    found = Fit(replace(fitted, seen=seen), tuple(rows), before, after, by_runs)
    named = {n: replace(fitted.constants[n], fitted=True, source=found.source) for n in free}
    return replace(found, stack=replace(found.stack, constants={**fitted.constants, **named}))


def _check_near(rows: Sequence[PublishedRow], residuals: np.ndarray) -> None:
    """Warn of runs that no constants come near, and of equal configurations whose steps differ.

    Raises JobError if no constants come near more than half of the runs.
    """
    far = [r.case for r, one in zip(rows, residuals, strict=True) if abs(one) > math.log(FAR)]
    said = (
        f"{', '.join(far[:3])}{f' and {len(far) - 3} more' if len(far) > 3 else ''}: the fitted stack is more than "
        f"{FAR:g} times away from the measured step; check that step_s is in seconds, and leave other runs out"
    )
    if len(far) > len(rows) / 2:
        raise JobError(said)
    if far:
        warnings.warn(said, PiperWarning, stacklevel=3)
    alike: dict[tuple[tuple[str, str], ...], list[PublishedRow]] = {}
    for row in rows:
        key = tuple(sorted((k, v) for k, v in row.fields.items() if k not in OF_ONE_RUN))
        alike.setdefault(key, []).append(row)
    for same in alike.values():
        steps = [row.step_s or 1.0 for row in same]
        if max(steps) > APART * min(steps):
            names = ", ".join(row.case for row in same[:3])
            warnings.warn(
                f"{names}: equal in all columns, with steps of {min(steps):.4g} to {max(steps):.4g} s; no stack fits both",
                PiperWarning,
                stacklevel=3,
            )


def _step(
    stack: Stack, free: Sequence[str], residuals: np.ndarray, derivatives: np.ndarray
) -> Stack:
    """Return the stack after one weighted least squares, with every constant within its range."""
    weights = _weights(residuals)
    now = np.array([_scale(n, stack.constants[n].value) for n in free], float)
    priors = np.array([_scale(n, stack.constants[n].prior) for n in free], float)
    lows, highs = (
        np.array(
            [_scale(n, max(getattr(stack.constants[n], end), _LEAST.get(n, 1e-12))) for n in free],
            float,
        )
        for end in ("low", "high")
    )
    held: dict[int, float] = {}
    while True:
        open_ = [k for k in range(len(free)) if k not in held]
        target = -residuals - sum(
            (derivatives[:, k] * (held[k] - now[k]) for k in held), np.zeros(len(residuals))
        )
        matrix = np.vstack([weights[:, None] * derivatives[:, open_], np.eye(len(open_)) / RIDGE])
        right = np.concatenate([weights * target, (priors[open_] - now[open_]) / RIDGE])
        change, *_ = np.linalg.lstsq(matrix, right, rcond=None)
        found = now.copy()
        found[open_] += change
        for k, value in held.items():
            found[k] = value
        outside = [k for k in open_ if not lows[k] <= found[k] <= highs[k]]
        if not outside:
            break
        worst = max(outside, key=lambda k: max(lows[k] - found[k], found[k] - highs[k]))
        held[worst] = float(np.clip(found[worst], lows[worst], highs[worst]))
    return _with(stack, {n: _value(n, float(found[k])) for k, n in enumerate(free)})


_LEAST = {"hidden": 0.0}


def _weights(residuals: np.ndarray) -> np.ndarray:
    return np.asarray(np.sqrt(1.0 / np.maximum(NOISE, np.abs(residuals)) / NOISE))


def _resolution(derivatives: np.ndarray, residuals: np.ndarray) -> list[float]:
    """Return by constant the share of its value that runs decide rather than its prior."""
    weighted = _weights(residuals)[:, None] * derivatives
    information = weighted.T @ weighted + np.eye(derivatives.shape[1]) / RIDGE**2
    return [float(1 - v / RIDGE**2) for v in np.diag(np.linalg.inv(information))]


def _scale(name: str, value: float) -> float:
    return value if name in LINEAR else math.log(value)


def _value(name: str, scaled: float) -> float:
    return scaled if name in LINEAR else math.exp(scaled)


def _moved(one: StackConstant, step: float) -> float:
    """Return a value near a constant's, within its range."""
    up = one.value * (1 + step) + (step if one.value == 0 else 0.0)
    if up <= one.high:
        return up
    down = one.value / (1 + step)
    return down if one.low <= down < one.value else one.low if one.low < one.value else one.high


def _with(stack: Stack, values: Mapping[str, float]) -> Stack:
    """Return a stack with other values of constants."""
    changed = {
        n: replace(
            stack.constants[n], value=min(max(v, stack.constants[n].low), stack.constants[n].high)
        )
        for n, v in values.items()
    }
    return replace(stack, constants={**stack.constants, **changed})


def _residuals(rows: Sequence[PublishedRow], stack: Stack, predict: Predictor) -> np.ndarray:
    """Return log(predicted / measured) of each run; raise JobError for one that cannot be predicted."""
    residuals = []
    for one in predict(rows, stack):
        if one.refused or one.row.step_s is None:
            raise JobError(
                f"{one.row.case} cannot be predicted, so nothing is fitted to it: {one.refused}"
            )
        residuals.append(math.log(one.step_s / one.row.step_s))
    return np.array(residuals)
