"""Say which types the public names have for an editor or a type checker; `make check` runs mypy on this file.

Nothing here is executed.
"""

from __future__ import annotations

from typing import assert_type

import piper
from piper_compiler import Directive
from piper_ir.plan import Plan


def used(job: piper.Job, costs: piper.Costs) -> None:
    strategy = piper.Strategy(piper.Mesh(pp=2), piper.recipes.one_f_one_b(pp=2, microbatches=4))
    compiled = piper.compile(job, strategy, costs=costs)
    assert_type(piper.recipes.one_f_one_b(pp=2, microbatches=4), tuple[Directive, ...])
    assert_type(piper.where(stage=0), piper.Where)
    assert_type(compiled, piper.Compiled)
    assert_type(compiled.plan, Plan)
    assert_type(piper.simulate(compiled.plan, "h100x8"), piper.Simulation)
    assert_type(piper.execute(compiled, steps=1), piper.Run)
    assert_type(piper.why(compiled.plan, "h100x8"), piper.Why)
    assert_type(piper.__version__, str)
    misspelt = piper.Jbo  # type: ignore[attr-defined]  # there is no such name, and a type checker is to say so
    assert misspelt
