"""Take the settings of a process that code depends on, in torch, numpy and Python, to another process.

A script may have set them before it calls Piper, and a process that is forked or started elsewhere has its own.
"""

from __future__ import annotations

import decimal
import locale
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from piper_ir.ground.errors import JobError

_PRECISIONS = tuple(
    f"backends.{name}fp32_precision"
    for name in (
        "", "cuda.matmul.", "cudnn.", "cudnn.conv.", "cudnn.rnn.", "mkldnn.", "mkldnn.matmul.", "mkldnn.conv.", "mkldnn.rnn.",
    )
)  # fmt: skip
"""The flags for the precision of float32 products, by torch's newer names."""
_OLDER = ("backends.cuda.matmul.allow_tf32", "backends.cudnn.allow_tf32")
"""The flags for this precision by torch's older names, which raise RuntimeError once a newer one has been set."""
FLAGS = (
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.mkldnn.enabled",
    "backends.mkldnn.deterministic",
)
"""The flags of torch that travel; a flag of all backends stands before the flags of one backend."""


@dataclass(frozen=True)
class ProcessSettings:
    """Hold the settings of a process.

    Attributes:
        dtype: torch's default dtype.
        device: torch's default device.
        deterministic: whether only deterministic algorithms of torch are used, and whether their lack is a warning.
        products: the precision of float32 products, by torch's older names; None if a newer one has been set.
        flags: `FLAGS` of torch, with the flags of float32 products by the names that the process uses.
        errors: a call that sets numpy's reaction to a division by zero and the like; None if numpy is not imported.
        decimals: the context of decimal numbers of this thread.
        locale: the name that sets this locale again by `locale.setlocale`.
    """

    dtype: torch.dtype
    device: str
    deterministic: tuple[bool, bool]
    products: str | None
    flags: Mapping[str, Any]
    errors: Callable[[], object] | None
    decimals: decimal.Context
    locale: str

    @classmethod
    def of_now(cls) -> ProcessSettings:
        """Return the settings of this process."""
        numpy, products = sys.modules.get("numpy"), _products()
        flags = (*(_PRECISIONS if products is None else _OLDER), *FLAGS)
        return cls(
            torch.get_default_dtype(),
            str(torch.get_default_device()),
            (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            products,
            {flag: attrgetter(flag)(torch) for flag in flags},
            None if numpy is None else partial(numpy.seterr, **numpy.geterr()),
            decimal.getcontext().copy(),
            locale.setlocale(locale.LC_ALL),
        )

    def take(self) -> None:
        """Apply them to this process. Raises JobError for a default device, or a locale, that is another one here."""
        here = str(torch.get_default_device())
        if here != self.device:
            raise JobError(
                f"torch's default device is {self.device} in the launcher and {here} in the worker; leave it as it "
                f"is (torch.set_default_device), and name a device where a tensor is made"
            )
        torch.set_default_dtype(self.dtype)
        only, warn_only = self.deterministic
        torch.use_deterministic_algorithms(only, warn_only=warn_only)
        if self.products not in (None, _products()):
            torch.set_float32_matmul_precision(self.products)
        for flag, value in self.flags.items():
            owner, _, name = flag.rpartition(".")
            if attrgetter(flag)(torch) != value:
                setattr(attrgetter(owner)(torch), name, value)
        if self.errors is not None:
            self.errors()
        decimal.setcontext(self.decimals.copy())
        try:
            locale.setlocale(locale.LC_ALL, self.locale)
        except locale.Error as error:
            raise JobError(
                f"the launcher has the locale {self.locale!r}, which this machine lacks ({error}); install it"
            ) from error


def _products() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # a newer name has been used
        return None
