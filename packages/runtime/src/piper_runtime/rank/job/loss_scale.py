"""Scale the loss of float16, so that small gradients do not vanish, and skip the steps whose gradients overflow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from piper_ir.ground.errors import JobError
from piper_ir.ground.keywords import checked_fields


@checked_fields(JobError)
@dataclass(frozen=True)
class LossScale:
    """Describe dynamic loss scaling; raise JobError for numbers that no training could use.

    The backward starts from `scale` instead of 1, and the optimizer sees gradients that are divided by it. A step whose
    gradient is not finite is skipped: parameters and optimizer state stay. The defaults are torch.amp.GradScaler's;
    `hysteresis` and `least` are as in Megatron-LM and DeepSpeed. The schedule of learning rates counts skipped steps,
    as a loop does that calls scaler.step(optimizer) and scheduler.step().

    Attributes:
        initial: the scale of the first step.
        growth: the factor of the scale after `interval` steps in a row without an overflow; 1 keeps the scale.
        backoff: the factor of the scale after an overflow; 1 keeps the scale.
        interval: the number of such steps.
        hysteresis: the number of overflows from which on the scale falls. They are counted anew when it grows.
        least: the smallest scale; an overflow there ends the run.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    hysteresis: int = 1
    least: float = 1.0

    def __post_init__(self) -> None:
        for name, low, high, accepted in (
            ("initial", 0.0, inf, "a number above 0"),
            ("growth", 1.0, inf, "a number of at least 1"),
            ("backoff", 0.0, 1.0, "a number above 0 and at most 1"),
            ("interval", 1, inf, "an integer of at least 1"),
            ("hysteresis", 1, inf, "an integer of at least 1"),
            ("least", 0.0, self.initial, "a number above 0 and at most `initial`"),
        ):
            value = getattr(self, name)
            whole = isinstance(low, int)
            fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if not fits or not low <= value <= high or not 0 < value < inf:
                raise JobError(f"LossScale({name}={value!r}): {accepted} is needed")

    @classmethod
    def fixed(cls, scale: float) -> LossScale:
        """Return a scale that stays as it is; steps whose gradient is not finite are skipped nevertheless."""
        return cls(scale, growth=1.0, backoff=1.0, least=scale)


class RunningScale:
    """Hold the scale of a run, which all ranks change alike, since they see the same norm of the gradient.

    `value` is the scale of the next step, `used` that of the last one, and `skipped` says whether its update was
    skipped.
    """

    def __init__(self, settings: LossScale):
        self._settings = settings
        self.value = self.used = settings.initial
        self.skipped = False
        self._good, self._patience = 0, settings.hysteresis

    @property
    def at_least(self) -> bool:
        """Return whether an overflow can make the scale no smaller, though it should."""
        return self._settings.backoff < 1 and self.value <= self._settings.least

    def update(self, finite: bool) -> None:
        """Count a step, and set the scale of the next one."""
        settings, self.used, self.skipped = self._settings, self.value, not finite
        if finite:
            self._good += 1
            if self._good == settings.interval:
                self.value *= settings.growth
                self._good, self._patience = 0, settings.hysteresis
        else:
            self._good = 0
            self._patience -= 1
            if self._patience <= 0:
                self.value = max(self.value * settings.backoff, settings.least)

    def state(self) -> dict[str, float]:
        """Return what a checkpoint holds of it."""
        return {"scale": self.value, "good": self._good, "patience": self._patience}

    def load(self, state: Mapping[str, float]) -> None:
        """Go on from the state of a checkpoint; without one, as at the beginning."""
        if state:
            self.value = float(state["scale"])
            self._good, self._patience = int(state["good"]), int(state["patience"])
