"""Find the module in whose forward Dynamo fails (torch >= 2.11)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.variables import nn_module as dynamo_modules

from piper_compiler.capture._torch import in_place


@contextmanager
def failing_module() -> Iterator[list[torch.nn.Module]]:
    """Give a list that holds, after an error of Dynamo's, the innermost module in whose forward it arose."""
    found: list[torch.nn.Module] = []
    seen: list[BaseException] = []
    record = dynamo_modules.record_nn_module_stack

    @contextmanager
    def noting(key: str, source: Any, tx: Any, module: torch.nn.Module) -> Iterator[None]:
        with record(key, source, tx, module):
            try:
                yield
            except Exception as error:
                if not seen or seen[0] not in _chain(error):  # else a module further in has noted it
                    found[:] = [module]
                seen[:] = [error]
                raise

    with in_place(dynamo_modules, {"record_nn_module_stack": noting}):
        yield found


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those during whose handling it was raised."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
