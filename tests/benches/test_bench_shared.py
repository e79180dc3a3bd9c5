"""Measurements of states that ranks share: the plans beside FSDP2 share all states, and both sides train alike, also
when both compile."""

from __future__ import annotations

import pytest
import torch

from benchmarks import compiled_time, step_model, step_time
from piper import models
from piper.models import DecoderConfig
from piper_ir.program.ops import Collective


@pytest.mark.long
@pytest.mark.parametrize("kind", step_time.SHARDED)
def test_the_plans_beside_fsdp2_share_all_states(kind: str) -> None:
    gathers = {}
    for resident in (0, "step"):
        plan = step_time.sharded(kind, step_model.TINY, resident).plan
        assert all(b.shard.params == ("dp",) for b in plan.buckets)
        parts = [p for i in plan.roles[0].program for p in i.parts]
        gathers[resident] = sum(
            isinstance(p.op, Collective) and p.op.kind == "all_gather" for p in parts
        )
    assert gathers["step"] < gathers[0]


@pytest.mark.long
def test_both_sides_train_the_same_and_hold_what_is_measured() -> None:
    kind = "FSDP2, 1F1B"
    setup = step_time.sharded(kind, step_model.TINY, 0)
    rows = step_time.compared("sharded", setup, 1, quick=False)
    assert all(row.value > 0 for row in rows)
    assert step_time.peak(kind, step_model.TINY, "step").value > 0


@pytest.mark.long
def test_compiled_steps_are_beside_torch_compile_and_eager_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sides train the same; a process without rounds has an empty cache."""
    tiny = models.GPTConfig(layers=1, width=16, heads=2, vocab=32, length=8)
    asked: list[int] = []

    def here(config: DecoderConfig, precision: str, folder: str, rounds: int) -> object:
        asked.append(rounds)
        return compiled_time.measure(config, precision, rounds, rows=1, microbatches=2)

    monkeypatch.setattr(compiled_time, "_in_a_process", here)
    rows = list(compiled_time.compared("tiny", tiny, "bfloat16", 1))
    assert asked == [0, 1] and all(row.value > 0 for row in rows)
    assert [str(row.goal) for row in rows] == ["> 0.98", "> 1.25", "None", "< 1.02", "None", "< 3"]
    monkeypatch.setattr(
        compiled_time, "adamw", lambda named: torch.optim.SGD([p for _, p in named], lr=1.0)
    )
    with pytest.raises(RuntimeError, match="do not train the same"):
        compiled_time.measure(tiny, "float32", 0, rows=1, microbatches=2)


@pytest.mark.long
def test_compiled_sides_train_the_same() -> None:
    setup = step_time.sharded("FSDP2", step_model.TINY, "step", compiled=True)
    steps = {
        step for chunk in setup.code.values() for step, c in chunk.items() if "FUSION" in c.source
    }
    assert steps >= {"F", "B"}
    assert all(row.value > 0 for row in step_time.compared("step", setup, 1, quick=False))
