"""One way to judge a composition: its plan breaks no rule, trains what one device trains, and says its memory to the
byte."""

from __future__ import annotations

from typing import Any

from piper_ir.verify import verify
from piper_runtime.launch.ground.result import Run
from tests.helpers import compositions, parity
from tests.helpers.compositions import FLOAT8, MIXED, Composition
from tests.helpers.memory_judge import lies

FLOAT16 = 2e-2
"""The tolerance of float16; random draws with eight layers were at 6e-3."""


def judge(c: Composition, memory: bool = True, **options: Any) -> Run:
    """Compile, verify, run for three steps and compare with plain PyTorch on the whole batch; memory is measured in the
    second step.

    Raises AssertionError with the composition and the first differences.
    """
    compiled = compositions.compiled(c)
    plan = compiled.plan
    verify(plan)
    assert plan.shared or c.tp == c.cp == 1, f"{c!r}: no device shares a chunk"
    if c.precision in MIXED and compositions.precision_of(c.precision).compute:
        assert all(b.mastered for b in plan.buckets), f"{c!r}: parameters without a master"
    run = compositions.run(c, compiled, memory=memory, **options)
    exact = c.precision in ("float64", *FLOAT8)
    narrow = c.precision == "float16"
    near = FLOAT16 if narrow else parity.FLOAT64 if exact else parity.FLOAT32
    parity.assert_parity(
        run,
        compositions.expected(c),
        near,
        # others make steps of rounding where a true gradient is zero
        parameters=exact or (c.precision in MIXED and c.optimizer == "sgd"),
        label=repr(c),
    )
    differing = lies(plan, dict(run.memory))
    assert not differing, "\n".join([repr(c), *differing[:6]])
    return run
