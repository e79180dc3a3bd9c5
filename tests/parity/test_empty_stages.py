"""Protect stages without layers: they train what one device trains, and their chunks pass values on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import piper
from piper.views.explained.explain import explain
from piper_capture.store import codestore
from piper_compiler import Strategy, compile_program, partition, recipes
from piper_ir.ground.errors import DirectiveError
from piper_ir.ground.mesh import Mesh
from piper_ir.verify import verify
from piper_runtime.launch.processes.processes import Pool
from tests.helpers import compositions, parity
from tests.helpers.compositions import Composition
from tests.helpers.judged import judge
from tests.helpers.memory_judge import lies

DEEP = Composition("deep", 2, microbatches=4, schedule="interleaved", chunks=2, at=(1, 1, 2))
"""Stage 1, the first of device 1, is empty."""


def test_an_empty_stage_trains_what_one_device_trains(pool: Pool) -> None:
    judge(DEEP)
    four = Composition("deep", 4, microbatches=4, schedule="1f1b", at=(2, 2, 2))  # two in a row
    judge(four, launcher="processes", pool=pool)


@pytest.mark.parametrize(
    "more",
    [
        dict(schedule="zbv", chunks=0, clip=0.05, optimizer="adamw"),
        dict(dp=2, zero=3, keep="inputs", bucket_mb=0.002),
        pytest.param(dict(tp=2, stream="tokens", precision="mixed"), marks=pytest.mark.long),
    ],
    ids=["split backward", "states and recomputation", "sharded tokens"],
)
def test_empty_stages_compose(more: dict[str, Any]) -> None:
    judge(Composition(**{**vars(DEEP), **more}))


def strategy(at: tuple[int, ...], pp: int = 3) -> Strategy:
    """One device with the embedding alone, one with the loss alone, and empty ones."""
    return Strategy(
        Mesh(pp=pp), (partition(pp, at=at, units="all"), recipes.one_f_one_b(microbatches=4))
    )


@pytest.mark.parametrize(("at", "empty"), [((1, 9), []), ((1, 1, 9, 9), ["empty1", "empty3"])])
def test_embedding_and_loss_alone(at: tuple[int, ...], empty: list[str]) -> None:
    c = Composition("deep", microbatches=4)
    compiled = piper.compile(compositions.job_of(c), strategy(at, len(at) + 1))
    verify(compiled.plan)
    chunks = [chunk.id for chunk in compiled.plan.chunks]
    assert [id for id in chunks if id.startswith("empty")] == empty
    names = [{s.name for s in simulation_spans(compiled, r)} for r in range(len(at) + 1)]
    assert "root.W@0" in names[0] and not any("layer" in name for name in names[0] | names[-1])
    text = explain(compiled)
    assert "layers: 8" in text, "which has no layouts of empty stages"
    assert [line.split()[2] for line in text.splitlines() if "passes its inputs on" in line] == [
        "empty:"
    ] * len(empty)
    for id in empty:
        assert any(name.startswith(f"{id}.F") for name in names[int(id[5:])])
    run = compositions.run(c, compiled, memory=True)
    parity.assert_parity(run, compositions.expected(c))
    assert not lies(compiled.plan, dict(run.memory))


def simulation_spans(compiled: Any, rank: int) -> list[Any]:
    spans = piper.simulate(compiled.plan, "h100x8").trace.spans
    return [s for s in spans if s.rank == rank and s.stream == "compute"]


def test_a_wrong_copy_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a chunk that passes on twice its values does not train what one device trains."""
    traced = codestore.trace_joint

    def doubled(module: Any, *rest: Any) -> Any:
        (output,) = [n for n in module.graph.nodes if n.op == "output"]
        if output.args[0][0].name == "value0":
            with module.graph.inserting_before(output):
                twice = [module.graph.call_function(torch.mul, (n, 2)) for n in output.args[0]]
            output.args = (tuple(twice),)
        return traced(module, *rest)

    monkeypatch.setattr(codestore, "trace_joint", doubled)
    # A capture keeps what it has traced: no other test has this model in this dtype with an empty stage.
    case = Composition("gpt_untied", 3, microbatches=2, schedule="1f1b", at=(1, 1))
    with pytest.raises(AssertionError, match="not what one device computes"):
        judge(replace(case, precision="float32"))


def test_what_cannot_be_empty_is_refused() -> None:
    c = Composition("deep", microbatches=4)
    job, program = compositions.job_of(c), compositions.captured("deep").program
    for at in ((0, 1), (1, 10)):  # the first, the last
        with pytest.raises(DirectiveError, match=r"among the units 1\.\.9 .*condition 2"):
            piper.compile(job, strategy(at))
    with pytest.raises(DirectiveError, match=r"compile a job.*condition 8"):
        compile_program(program, strategy((2, 2)))
    two = (partition(3, at=(2, 2)), partition(3, at=(1, 1)))
    with pytest.raises(DirectiveError, match=r"another partition has .*condition 8"):
        piper.compile(job, Strategy(Mesh(pp=3), (two, recipes.one_f_one_b(microbatches=4))))
