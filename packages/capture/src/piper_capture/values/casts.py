"""Hold the dtypes of a capture: the casts of parameters, buffers, batch and gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from piper_ir.ground.errors import CaptureError
from piper_ops import Float8

CASTS = (
    "Parameters and floating-point inputs of products have the dtype of Job.precision, and buffers the one that "
    "the model gave them (all are float64 in `piper verify`). Cast where they meet: self.table.to(x.dtype), or the "
    "result .to(x.dtype); before a layer that is kept in another dtype, x.to(self.router.weight.dtype)."
)
"""The advice if an operator gets floating-point tensors of different dtypes."""


@dataclass(frozen=True)
class Casts:
    """Hold the dtypes of a capture.

    Attributes:
        compute: floating-point parameters and batch tensors are cast to it; None leaves all as they are.
        reduce: the dtype of gradient accumulators; None for the dtype of their parameters.
        keep: pattern of parameter names -> their dtype in place of `compute`; the first match counts.
        exact: names of batch tensors that are cast to `wide`, not to `compute`.
        wide: the dtype of `exact` tensors, unless they come in `compute`.
        float8: the linear layers that multiply in float8.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    keep: Mapping[str, torch.dtype] = field(default_factory=dict)
    exact: frozenset[str] = frozenset()
    wide: torch.dtype = torch.float32
    float8: Float8 | None = None

    def of_parameter(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the dtype of a parameter."""
        if not tensor.is_floating_point():
            return tensor.dtype
        kept = next(
            (dtype for pattern, dtype in self.keep.items() if fnmatchcase(name, pattern)),
            self.compute,
        )
        return kept or tensor.dtype

    def of_buffer(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype of a buffer: the model's, or float64 for floating-point ones if `compute` is float64."""
        wide = self.compute == torch.float64 and tensor.is_floating_point()
        return torch.float64 if wide else tensor.dtype

    @property
    def narrow(self) -> bool:
        """Return whether `compute` cannot represent all values of `wide`."""
        return (
            self.compute is not None
            and torch.promote_types(self.compute, self.wide) != self.compute
        )

    def of_batch(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the dtype of a tensor of the batch."""
        if self.compute is None or not tensor.is_floating_point() or tensor.dtype == self.compute:
            return tensor.dtype
        return self.wide if name in self.exact else self.compute

    def check(self, names: Collection[str]) -> None:
        """Raise CaptureError for a pattern of `keep` that matches no parameter."""
        for pattern in self.keep:
            if not any(fnmatchcase(name, pattern) for name in names):
                some = ", ".join(list(names)[:3])
                raise CaptureError(
                    f"Precision(keep={{{pattern!r}: ...}}): no parameter has such a name; they are called "
                    f"{some}{', ...' if len(names) > 3 else ''}"
                )
