"""Describe the dtypes of a job: of its parameters, of forward and backward, and of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from piper_ir.ground.errors import JobError
from piper_ir.ground.keywords import checked_fields
from piper_ops import Float8
from piper_runtime.rank.job.job_advice import dtype_problem
from piper_runtime.rank.job.loss_scale import LossScale

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The accepted dtypes by torch's names, widest first."""
FOR_ALL = {name: dtype for name, dtype in DTYPES.items() if name != "float16"}
"""The dtypes that may be that of the parameters too."""


@checked_fields(JobError)
@dataclass(frozen=True)
class Precision:
    """Hold dtypes by torch's names; raise JobError for dtypes that do not go together.

    If a parameter's dtype in forward and backward is not `params`, a rank keeps it twice: a master in `params`, which
    the optimizer updates, and a copy that forward and backward read, written from it after every update.

    Attributes:
        params: the dtype of parameters as the optimizer, a state_dict and the user see them, and of optimizer state.
        compute: the dtype of parameters in forward and backward, of activations, and of floating-point batch tensors;
            None for that of `params`.
        reduce: the dtype in which gradients are reduced over ranks; None for that of `params`.
        accumulate: the dtype in which a rank sums its gradients over microbatches; None for that of `reduce`.
        keep: pattern of parameter names, such as "*.router.*" -> the dtype of these parameters in forward and backward,
            instead of `compute`. The first pattern that matches counts.
        loss_scale: how the loss is scaled before the backward; a number is a fixed scale. None: `LossScale()` if
            anything is computed or summed in float16, else no scale.
        float8: the linear layers that multiply in float8; the name of a recipe stands for all layers under it.
    """

    params: str = "float32"
    compute: str | None = None
    reduce: str | None = None
    keep: Mapping[str, str] = field(default_factory=dict, hash=False)
    loss_scale: LossScale | float | None = None
    float8: Float8 | str | None = None
    accumulate: str | None = None

    def __post_init__(self) -> None:
        for name in ("params", "compute", "reduce", "accumulate"):
            value = getattr(self, name)
            if value not in DTYPES and not (value is None and name != "params"):
                raise JobError(dtype_problem(name, value, DTYPES))
        if self.params == "float16":
            raise JobError(
                "Precision(params='float16'): the optimizer's steps are too small for float16; "
                "Precision(params='float32', compute='float16') computes in it, with a scaled loss"
            )
        self._check_narrower("compute", self.compute or self.params)
        if not isinstance(self.keep, Mapping):
            raise JobError(
                f"Precision(keep={self.keep!r}): a dict of patterns and dtypes is needed, such as {{'*.router.*': "
                f"'float32'}}"
            )
        for pattern, value in self.keep.items():
            if value not in DTYPES:
                raise JobError(dtype_problem(f"keep={{{pattern!r}: ...}}", value, DTYPES))
            self._check_narrower(f"keep[{pattern!r}]", value)
        self._check_loss_scale()
        if isinstance(self.float8, str):
            object.__setattr__(self, "float8", Float8(self.float8))
        if not isinstance(self.float8, Float8 | None):
            raise JobError(
                f"Precision(float8={self.float8!r}): a piper.Float8 is needed, or the name of a recipe"
            )
        if self.float8 is not None and self.float8.problem:
            raise JobError(f"Float8({self.float8.problem})")

    def _check_loss_scale(self) -> None:
        scale = self.loss_scale
        if isinstance(scale, bool) or not isinstance(scale, LossScale | float | int | None):
            raise JobError(
                f"Precision(loss_scale={scale!r}): a number is needed, or a piper.LossScale for a scale that changes"
            )
        if isinstance(scale, float | int):
            LossScale.fixed(scale)

    def _check_narrower(self, name: str, value: str) -> None:
        """Refuse a wider dtype than the optimizer's: the parameters would only be padded with zeros.

        Of the narrow dtypes none is wider, and float16 lacks the range of bfloat16.
        """
        order = list(DTYPES)
        if value == "float16" and self.params == "bfloat16":
            raise JobError(
                f"Precision(params='bfloat16'): {name} is float16, which lacks the range of the parameters; give "
                f"params='float32'"
            )
        if order.index(value) < order.index(self.params):
            raise JobError(
                f"Precision(params={self.params!r}): {name} is {value}, which is wider than the parameters; they "
                f"would only be padded. Give params={value!r}, or a {name} of at most {self.params}"
            )

    @property
    def dtype(self) -> torch.dtype:
        """Return torch's dtype of `params`."""
        return DTYPES[self.params]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return torch's dtype of `compute`."""
        return DTYPES[self.compute or self.params]

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Return torch's dtype of `reduce`."""
        return DTYPES[self.reduce or self.params]

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """Return torch's dtype of `accumulate`."""
        return DTYPES[self.accumulate] if self.accumulate else self.reduce_dtype

    @property
    def batch_dtype(self) -> torch.dtype:
        """Return torch's dtype of targets, and of other batch tensors that are not cast to `compute`."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def sums_in(self) -> torch.dtype | None:
        """Return the dtype of gradient accumulators; None if forward and backward use it for every parameter."""
        alike = {self.compute_dtype, *self.kept.values()} == {self.accumulate_dtype}
        return None if alike else self.accumulate_dtype

    @property
    def kept(self) -> dict[str, torch.dtype]:
        """Return torch's dtypes of `keep`, by pattern."""
        return {pattern: DTYPES[name] for pattern, name in self.keep.items()}

    @property
    def quantised(self) -> Float8 | None:
        """Return the linear layers that multiply in float8."""
        return self.float8 if isinstance(self.float8, Float8) else None

    @property
    def scaling(self) -> LossScale | None:
        """Return how the loss is scaled; None if it is not."""
        if isinstance(self.loss_scale, float | int):
            return LossScale.fixed(self.loss_scale)
        narrow = "float16" in (self.compute, self.reduce, self.accumulate, *self.keep.values())
        return self.loss_scale or (LossScale() if narrow else None)

    @property
    def key(self) -> str:
        """Return the text of everything that a capture depends on."""
        more = f" {self.float8}" if self.float8 is not None else ""
        more += " scaled" if self.scaling is not None else ""
        return f"{self.compute_dtype} {self.accumulate_dtype} {self.batch_dtype} {list(self.keep.items())}{more}"


class PrecisionField:
    """Hold the field `Job.precision`, which is a Precision for its readers; the name of a dtype is one for all."""

    def __get__(self, job: object | None, owner: type | None = None) -> Precision:
        if job is None:
            return Precision()
        precision: Precision = vars(job)["precision"]
        return precision

    def __set__(self, job: object, value: Precision | str) -> None:
        vars(job)["precision"] = (
            Precision(value) if isinstance(value, str) and value in DTYPES else value
        )
