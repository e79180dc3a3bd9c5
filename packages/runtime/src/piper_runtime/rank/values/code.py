"""Load generated step functions, which reach a rank as source text and constants, never as a pickled function."""

from __future__ import annotations

import linecache
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import sha256
from types import CodeType
from typing import Any, Protocol

import torch
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload

from piper_ir.ground.errors import FormatError
from piper_ir.plan.plan import Plan, RolePlan
from piper_ir.program.ops import Compute
from piper_ir.tools import user_line
from piper_ops import DIRECT, compiled_fusion

PROGRESS_S = 1.0
"""The seconds between two signs of progress of a rank that compiles."""
COMPILING_S = 900.0
"""The seconds for which compiling a group counts as progress: a compiler that takes longer is waited for in vain."""

StepFunction = Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]
"""A step function that empties its argument list, so that a tensor held only by the list is freed at its last use."""


class StepSource(Protocol):
    """Describe the source of `def step(args)` and the constants that it uses by name."""

    @property
    def source(self) -> str: ...
    @property
    def constants(self) -> Mapping[str, Any]: ...


Kernels = Mapping[OpOverload, Callable[..., Any]]
"""The functions that step functions call in place of operators."""

_GENERATED = "<piper step"
_OPERATOR = re.compile(r"torch\.ops\.(\w+)\.(\w+)")

ExportedCode = Mapping[str, Mapping[Any, StepSource]]
"""The code of a store for one number of rows: code id of a chunk -> step -> its code."""


@dataclass(frozen=True)
class ShippedCode:
    """Hold a StepCode in the form that travels to a worker."""

    source: str
    constants: Mapping[str, Any] = field(default_factory=dict)


def load_step(
    code: StepSource,
    device: str | torch.device = "cpu",
    given: Mapping[str, Any] | None = None,
    kernels: Kernels | None = None,
) -> StepFunction:
    """Return the function that a StepSource describes, for tensors on `device`; its source shows in tracebacks.

    `given` has further globals that the code reads, and `kernels` the functions that it calls in place of operators.

    Raises FormatError when there is no function `step`, or when it calls an operator that is not registered in this
    process.
    """
    namespace: dict[str, Any] = {
        "torch": torch,
        "DEVICE": torch.device(device),
        "FUSION": partial(compiled_fusion, device=device),
        **(given or {}),
    }
    namespace |= {
        k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in code.constants.items()
    }
    try:
        exec(_compiled(code.source), namespace)  # the source comes from our own code generator
    except AttributeError as e:
        raise FormatError(
            f"{e}; import the module that registers this operator in the file that defines the job"
        ) from e
    if not callable(namespace.get("step")):
        raise FormatError("the source of a chunk's step defines no function `step(args)`")
    called = {**DIRECT, **(kernels or {})}
    namespace |= {
        k: called[v] for k, v in namespace.items() if isinstance(v, OpOverload) and v in called
    }
    step: StepFunction = namespace["step"]
    return step


@lru_cache(maxsize=1024)
def _compiled(source: str) -> CodeType:
    """Return the code object of a source; ranks of one process, and runs of one session, share it."""
    name = f"{_GENERATED} {sha256(source.encode()).hexdigest()[:12]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    return compile(source, name, "exec")


_PLACE = re.compile(r"  # (.+):(\d+)$")


def raised_in_step(error: BaseException) -> str:
    """Return an instruction part's error as text, with the user's line: of the op in a step, or of a batch function."""
    if isinstance(error, KeyError):
        return f"value {error} is not there"
    frames = traceback.extract_tb(error.__traceback__)
    line = next((f.line or "" for f in reversed(frames) if f.filename.startswith(_GENERATED)), "")
    text, place = f"{type(error).__name__}: {error}", _PLACE.search(line)
    if place is None:
        return f"{text}{user_line(error)}"
    code = linecache.getline(place[1], int(place[2])).strip()
    return f"{text}, at {place[1]}:{place[2]}" + (f" ({code})" if code else "")


def missing_operators(code: ExportedCode) -> set[str]:
    """Return the operators that a code store calls and this process lacks, as "namespace.name"."""
    return {
        f"{space}.{name}"
        for space, name in _called(code)
        if not hasattr(getattr(torch.ops, space), name)
    }


def custom_operators(code: ExportedCode) -> list[object]:
    """Return the functions in Python that a code store calls through operators of `torch.library.custom_op`."""
    operators = [
        OPDEFS[name] for space, op in sorted(_called(code)) if (name := f"{space}::{op}") in OPDEFS
    ]
    return [function for op in operators for function in (op._init_fn, *op._backend_fns.values())]


def _called(code: ExportedCode) -> set[tuple[str, str]]:
    """Return (namespace, name) of each operator that a code store calls."""
    return {
        operator
        for steps in code.values()
        for c in steps.values()
        for operator in _OPERATOR.findall(c.source)
    }


class LoadedSteps:
    """Load the functions of a code store, each once, on first use."""

    def __init__(
        self, code: ExportedCode, device: str | torch.device = "cpu", given: Mapping[str, Any] | None = None,
        kernels: Kernels | None = None, progress: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Keep the code.

        `progress` is called every PROGRESS_S seconds while a group of operations compiles, for COMPILING_S at most.
        """
        self._code, self._device, self._kernels = code, device, kernels
        self._given = {"FUSION": self._fusion, **(given or {})}
        self._progress = progress
        self._loaded: dict[tuple[str, str], StepFunction] = {}

    def __call__(self, code_id: str, step: str) -> StepFunction:
        """Return the function of a step; raise FormatError when the store lacks the code."""
        key = (code_id, step)
        if key not in self._loaded:
            try:
                code = self._code[code_id][step]
            except KeyError:
                raise FormatError(
                    f"the code store has no step {step} of code {code_id!r}; was it made for this plan?"
                ) from None
            self._loaded[key] = load_step(code, self._device, self._given, self._kernels)
        return self._loaded[key]

    def _fusion(self, source: str, specs: Sequence[Any]) -> StepFunction:
        with _shown(self._progress):
            return compiled_fusion(source, specs, self._device)

    def constants_of(self, code_id: str, step: str) -> list[torch.Tensor]:
        """Return the tensors that the function of a step holds."""
        namespace: dict[str, Any] = self(code_id, step).__globals__
        return [
            c
            for name in self._code[code_id][step].constants
            if isinstance(c := namespace[name], torch.Tensor)
        ]


@contextmanager
def _shown(progress: Callable[[], None] | None) -> Iterator[None]:
    """Show progress until the block ends, also while it waits for another rank that compiles the same.

    After COMPILING_S it shows none, so that the watch of the run notices a compiler that hangs.
    """
    ended = threading.Event()
    longest = time.monotonic() + COMPILING_S

    def show() -> None:
        while progress is not None and not ended.wait(PROGRESS_S) and time.monotonic() < longest:
            progress()

    thread = threading.Thread(target=show, name="piper compiling", daemon=True)
    if progress is not None:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if progress is not None:
            thread.join()


def used_code(plan: Plan, role: RolePlan) -> Iterator[tuple[str, str]]:
    """Yield (code id, step) that a role executes, each once, in program order."""
    seen: set[tuple[str, str]] = set()
    for instr in role.program:
        for part in instr.parts:
            if isinstance(part.op, Compute):
                key = (plan.chunk(part.op.variant).code, part.op.step)
                if key not in seen:
                    seen.add(key)
                    yield key
