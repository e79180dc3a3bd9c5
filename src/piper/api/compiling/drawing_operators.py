"""Find custom operators whose kernels draw random numbers, which no graph shows."""

from __future__ import annotations

import types
from collections.abc import Iterator

from torch._library.custom_ops import OPDEFS

from piper_ir.program.program import Program
from piper_runtime.rank import cells, home_of, names_in

DRAWS = frozenset({
    "alpha_dropout", "bernoulli", "bernoulli_", "cauchy_", "dropout", "dropout1d", "dropout2d", "dropout3d", "exponential_",
    "feature_alpha_dropout", "feature_dropout", "geometric_", "gumbel_softmax", "log_normal_", "multinomial", "native_dropout",
    "normal", "normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random_", "randperm",
    "rrelu", "uniform_",
})  # fmt: skip
"""The functions and methods of torch that draw from its generator."""


def drawing_operators(program: Program) -> Iterator[str]:
    """Yield a message for each operator of torch.library.custom_op in a program whose kernel draws."""
    ops = {
        kernel.op
        for chunk in program.chunks
        for step in chunk.steps.values()
        for kernel in step.cost.kernels
    }
    for name in sorted(op for op in ops if op in OPDEFS):
        for kernel in (OPDEFS[name]._init_fn, *OPDEFS[name]._backend_fns.values()):
            for code in _reached(kernel):
                drawing = sorted(names_in(code)[2] & DRAWS)
                if drawing:
                    place = f"{code.co_filename}:{code.co_firstlineno} (in {code.co_name})"
                    yield f"{place}: the operator {name} draws in its kernel ({', '.join(drawing)})"


def _reached(kernel: object) -> Iterator[types.CodeType]:
    """Yield the code of a function, and of the user's functions that it calls by name."""
    todo, seen = [kernel], set()
    while todo:
        function = todo.pop()
        if isinstance(function, types.FunctionType) and function.__code__ not in seen:
            seen.add(function.__code__)
            yield function.__code__
            space = function.__globals__
            named = [space[name] for name in names_in(function.__code__)[0] if name in space]
            called = (f for f in (*named, *cells(function)) if isinstance(f, types.FunctionType))
            todo += (f for f in called if home_of(f.__module__) != "known")
