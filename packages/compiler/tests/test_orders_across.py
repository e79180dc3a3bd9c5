"""What no directive of ours can write, but one of the user's can."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from piper_compiler import Strategy, compile_program, directive, recipes, synthetic
from piper_ir.graph.graph import Graph
from piper_ir.ground.errors import CompileError
from piper_ir.ground.mesh import Mesh


def test_an_order_between_devices_is_refused() -> None:
    """Only a directive of one's own can ask for it; the message names it and both devices."""

    @dataclass(frozen=True)
    class Across:
        def check(self, graph: Graph) -> None: ...

        def apply(self, graph: Graph) -> Graph:
            edit = graph.edit()
            edit.order("stage1.F@0", "stage0.F@1")
            return edit.done()

    strategy = Strategy(Mesh(pp=2), (*recipes.pipeline(pp=2, microbatches=2), directive(Across)()))
    with pytest.raises(
        CompileError,
        match=r"stage1\.F@0 cannot be ordered before stage0\.F@1 \(by across\(\).*on pp1.*on pp0",
    ):
        compile_program(synthetic(stages=2, F=1, I=1, W=1), strategy)
