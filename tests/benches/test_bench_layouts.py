"""The check of ranks that share chunks on a device, on the CPU: its rows, and that it sees what it is for."""

from __future__ import annotations

import pytest
import torch

import piper
from benchmarks import gpu_check, gpu_layouts
from piper.models import LlamaConfig, MoEConfig

LLAMA = LlamaConfig(layers=1, width=32, heads=4, kv_heads=2, hidden=32, vocab=32, length=16)
MIXTURE = MoEConfig(
    layers=1, width=32, heads=4, kv_heads=2, hidden=32, vocab=32, length=16, experts=4, top_k=2, balance=0.01
)  # fmt: skip
CASES = gpu_layouts.cases(LLAMA, MIXTURE)


def test_the_check_has_three_ways_of_sharing_and_proves_them() -> None:
    assert [dict(case.strategy.mesh.sizes) for case in gpu_layouts.cases().values()] == [
        {"tp": 2},
        {"cp": 2},
        {"ep": 2},
    ]
    assert gpu_check.layouts_here in list(gpu_check.sections()) and "layouts" in gpu_check.PROVES
    assert list(gpu_check.chosen(states=False, layouts=True)) == [gpu_check.layouts_here]


def test_rows_count_on_and_are_the_same_in_every_range() -> None:
    inputs, targets = gpu_layouts.counting(32, 16, 3, range(8))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert len({int(s) for s in (targets - inputs).remainder(32).unique()}) > 1
    assert all(
        torch.equal(a[2:5], b)
        for a, b in zip((inputs, targets), gpu_layouts.counting(32, 16, 3, range(2, 5)))
    )


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_on_a_cpu_each_is_one_rank_and_its_plan(name: str) -> None:
    """Ranks of this process; half of one parameter's gradient, a loss and a byte more are seen."""
    case = CASES[name]
    first, losses = gpu_layouts.alone_of(case, steps=6)
    compiled = piper.compile(gpu_layouts.work_of(case.config), case.strategy)
    run = piper.execute(compiled, steps=6, launcher="inline", gradients=True)
    found, plan = run.gradients[0], compiled.plan
    assert gpu_layouts.cosine_row(name, found, first).met
    assert gpu_layouts.loss_row(name, run.losses, losses).met and losses[-1] < losses[0]
    assert gpu_layouts.memory_row(name, plan, run.peak_bytes).value == 0
    last = list(found)[-1]
    half = found[last].clone()
    half[: len(half) // 2] = 0
    assert not gpu_layouts.cosine_row(name, found | {last: half}, first).met
    assert not gpu_layouts.loss_row(name, [1.03 * x for x in run.losses], losses).met
    assert not gpu_layouts.memory_row(
        name, plan, {r: n + (r == 1) for r, n in run.peak_bytes.items()}
    ).met
