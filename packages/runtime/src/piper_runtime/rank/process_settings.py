"""Take the settings of a process that code depends on, in torch, numpy and Python, to another process.

A script may have set them before it calls Piper, and a process that is forked or started elsewhere has its own.
"""

from __future__ import annotations

import decimal
import locale
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from piper_ir.errors import JobError

_PRECISIONS = tuple(
    f"backends.{name}fp32_precision"
    for name in (
        "", "cuda.matmul.", "cudnn.", "cudnn.conv.", "cudnn.rnn.", "mkldnn.", "mkldnn.matmul.", "mkldnn.conv.", "mkldnn.rnn.",
    )
)  # fmt: skip
"""How exact products of float32 are, by torch's present names; the names before them raise once these are used."""
FLAGS = (
    *_PRECISIONS,
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.mkldnn.enabled",
    "backends.mkldnn.deterministic",
)
"""The flags of torch that travel, those of all backends before those of one."""


@dataclass(frozen=True)
class ProcessSettings:
    """Hold the settings of a process.

    Attributes:
        dtype: torch's default dtype.
        device: torch's default device.
        deterministic: whether only deterministic algorithms of torch are used; where there is none, whether to warn only.
        flags: `FLAGS` of torch.
        errors: what numpy does at a division by zero and the like; None where it is not imported.
        decimals: the context of decimal numbers of this thread.
        locale: the name by which `locale.setlocale` gives this one again.
    """

    dtype: torch.dtype
    device: str
    deterministic: tuple[bool, bool]
    flags: Mapping[str, Any]
    errors: Mapping[str, Any] | None
    decimals: decimal.Context
    locale: str

    @classmethod
    def of_now(cls) -> ProcessSettings:
        """Return the settings of this process."""
        numpy = sys.modules.get("numpy")
        return cls(
            torch.get_default_dtype(),
            str(torch.get_default_device()),
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
            {flag: attrgetter(flag)(torch) for flag in FLAGS},
            None if numpy is None else numpy.geterr(),
            decimal.getcontext().copy(),
            locale.setlocale(locale.LC_ALL),
        )

    def take(self) -> None:
        """Give them to this process. Raises JobError for a default device, or a locale, that is another one here."""
        here = str(torch.get_default_device())
        if here != self.device:
            raise JobError(
                f"torch's default device is {self.device} in the launcher and {here} in the worker; leave it as it is "
                "(torch.set_default_device), and name a device where a tensor is made"
            )
        torch.set_default_dtype(self.dtype)
        only, warn_only = self.deterministic
        torch.use_deterministic_algorithms(only, warn_only=warn_only)
        for flag, value in self.flags.items():
            owner, _, name = flag.rpartition(".")
            if attrgetter(flag)(torch) != value:
                setattr(attrgetter(owner)(torch), name, value)
        if self.errors is not None:
            import numpy

            numpy.seterr(**self.errors)
        decimal.setcontext(self.decimals.copy())
        try:
            locale.setlocale(locale.LC_ALL, self.locale)
        except locale.Error as error:
            raise JobError(
                f"the launcher has the locale {self.locale!r}, which this machine lacks ({error}); install it"
            ) from error
