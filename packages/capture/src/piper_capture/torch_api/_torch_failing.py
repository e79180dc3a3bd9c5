"""Find the module whose forward makes Dynamo fail, or makes a size that Dynamo fails on later (torch >= 2.11)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.variables import nn_module as dynamo_modules
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from piper_capture.torch_api._torch import in_place, user_frame

MADE_OF_VALUES = ("create_unbacked_symint", "create_unbacked_symfloat", "create_unbacked_symbool")
"""The methods that make an unbacked symbol, for a number that depends on values of tensors."""


@dataclass
class Failing:
    """Hold the place of an error of Dynamo.

    Attributes:
        module: the innermost module whose forward was traced at the error, None outside of the model.
        sizes: unbacked symbol -> the module and the user's line that made it.
    """

    module: torch.nn.Module | None = None
    sizes: dict[str, tuple[torch.nn.Module, str]] = field(default_factory=dict)

    def made(self, error: BaseException) -> tuple[torch.nn.Module, str] | None:
        """Return the module and the line of an unbacked symbol that an error outside of the model names."""
        named = re.findall(r"\b(?:u|zuf|z?f)\d+\b", str(error)) if self.module is None else []
        return next((self.sizes[name] for name in named if name in self.sizes), None)


@contextmanager
def failing_module() -> Iterator[Failing]:
    """Give a record that holds the place of an error of Dynamo after it was raised."""
    failing, inside = Failing(), list[torch.nn.Module]()
    seen: list[BaseException] = []
    record = dynamo_modules.record_nn_module_stack

    @contextmanager
    def noting(key: str, source: Any, tx: Any, module: torch.nn.Module) -> Iterator[None]:
        with record(key, source, tx, module):
            inside.append(module)
            try:
                yield
            except Exception as error:
                if not seen or seen[0] not in _chain(
                    error
                ):  # else a module further in has noted it
                    failing.module = module
                seen[:] = [error]
                raise
            finally:
                inside.pop()

    def noted(create: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            number = create(*args, **kwargs)
            frame = user_frame(TracingContext.extract_stack()) if inside else None
            if frame is not None:
                failing.sizes[str(number.node.expr)] = (
                    inside[-1],
                    f"{frame.filename}:{frame.lineno} ({frame.line})",
                )
            return number

        return made

    makers = {name: noted(getattr(ShapeEnv, name)) for name in MADE_OF_VALUES}
    with in_place(dynamo_modules, {"record_nn_module_stack": noting}), in_place(ShapeEnv, makers):
        yield failing


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause or context, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
