"""Scale the loss of the reference by torch's own GradScaler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class ReferenceScale:
    """Scale losses and unscale gradients; the rule of the scale is restated here, since torch has no hysteresis."""

    def __init__(self, precision: Any):
        fields = [
            precision.compute,
            precision.reduce,
            precision.accumulate,
            *precision.keep.values(),
        ]
        narrow, given = "float16" in fields, precision.loss_scale
        self._scaler: torch.amp.GradScaler | None = None
        if given is None and not narrow:
            return
        self._rule, self._good, self._bad = given, 0, 0
        first = 2.0**16 if given is None else float(getattr(given, "initial", given))
        self._scaler = torch.amp.GradScaler("cpu", first)

    def of(self, loss: Tensor) -> Tensor:
        """Return a loss, scaled."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscaled(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Unscale the gradients of the optimizers' parameters; return whether the step is to be done.

        The scale of the next step is set, too.
        """
        scaler = self._scaler
        if scaler is None:
            return True
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        found = [scaler._found_inf_per_device(optimizer) for optimizer in optimizers]
        finite = not any(bool(number) for devices in found for number in devices.values())
        scaler.update(self._next(finite, scaler.get_scale()))
        return finite

    def _next(self, finite: bool, scale: float) -> Any:
        """Return the scale of the next step; None for the one that GradScaler chooses."""
        rule = self._rule
        if rule is None or isinstance(rule, float | int):
            return None if rule is None else scale
        self._good = self._good + 1 if finite else 0
        self._bad += not finite
        if not finite:
            falls = self._bad >= rule.hysteresis
            return max(scale * rule.backoff, rule.least) if falls else scale
        if self._good < rule.interval:
            return scale
        self._good = self._bad = 0
        return scale * rule.growth
