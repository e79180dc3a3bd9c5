"""Protect recipes in their steady states, with any number of chunks and microbatches: a model of eight layers, tied
weights and a skip over devices trains what one device trains; copies of a stage stay equal to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import piper
from piper import order, where
from piper_compiler import recipes
from piper_ir.program.ops import Compute
from tests.helpers import compositions, parity
from tests.helpers.compositions import Composition
from tests.helpers.judged import judge
from tests.helpers.memory_judge import lies

CHUNKED = {name for name, r in recipes.RECIPES.items() if "chunks" in r.make.__annotations__}
TWO_PER_DEVICE = {"dualpipe", "dualpipe_v", "zbv"}
"""Their steady state begins at that many microbatches."""


def case(name: str, pp: int, microbatches: int = 0, chunks: int = 2) -> Composition:
    m = microbatches or (8 if pp == 4 and name in TWO_PER_DEVICE else 4)
    more = (
        {"chunks": min(chunks, 2) if name == "zero_bubble" else chunks} if name in CHUNKED else {}
    )
    name = {"one_f_one_b": "1f1b"}.get(name, name)
    return Composition(
        "deep", pp, 1, m, name, optimizer="adamw", clip=0.05, bucket_mb=0.003, **more
    )


@pytest.mark.parametrize("name", sorted(TWO_PER_DEVICE))
def test_a_steady_state_that_begins_late(name: str) -> None:
    judge(case(name, 4))


def test_sends_in_an_order_of_their_own() -> None:
    """Values of microbatch 2 go first, and the next stage begins with those of microbatch 0 all the same."""
    c = Composition("gpt", 2, 1, 3)
    compositions.captured(c.model)
    sends = [where(op="send", phase="F", mb=mb) for mb in (2, 0, 1)]
    directives = (*recipes.pipeline(pp=2, microbatches=3), order(*sends))
    made = piper.compile(compositions.job_of(c), piper.Strategy(piper.Mesh(pp=2), directives))
    found = piper.execute(made, steps=parity.STEPS, launcher="inline", gradients=True)
    assert not lies(made.plan, found.memory)
    parity.assert_parity(found, compositions.expected(c))


def test_gathers_and_reductions_in_an_order_of_their_own() -> None:
    """The last layers are gathered first, and gradients are reduced behind the backward, the first layers' last."""
    c = Composition("gpt", 1, 2, 3, zero=1, bucket_mb=0.002)
    gathers = [where(op="gather", layer=k) for k in (1, 0)]
    reductions = [where(op="reduce", layer=k) for k in (1, 0)]
    pieces = (
        *recipes.one_f_one_b(pp=1, microbatches=3),
        *recipes.data_parallel(zero=1, bucket_mb=c.bucket_mb),
        order(*gathers),
        order(where(phase="B"), *reductions),
    )
    made = piper.compile(compositions.job_of(c), piper.Strategy(piper.Mesh(dp=2), pieces))
    found = piper.execute(made, steps=parity.STEPS, launcher="inline", gradients=True)
    assert not lies(made.plan, found.memory)
    parity.assert_parity(found, compositions.expected(c))


@pytest.mark.long
@given(
    st.sampled_from(sorted(compositions.PIPELINES)),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 9),
)
def test_inline(name: str, pp: int, chunks: int, microbatches: int) -> None:
    """Any numbers that the model's eight layers allow, few and odd numbers of microbatches among them."""
    pp += pp % 2 if name == "dualpipe" else 0
    judge(case(name, pp, microbatches, min(chunks, 8 // pp)))


def test_both_copies_of_a_two_way_pipeline_stay_equal_to_the_bit() -> None:
    """Every stage of DualPipe is on two devices; each adds the gradients of its microbatches, and they are summed."""
    c = case("dualpipe", 4)
    plan = compositions.compiled(c).plan
    homes: dict[str, set[str]] = {}
    for role, _, instr in plan.instructions():
        for part in instr.parts:
            if isinstance(part.op, Compute):
                homes.setdefault(part.op.chunk, set()).add(role.role)
    assert all(len(roles) == 2 for roles in homes.values()), homes
    run = judge(c)
    pairs = 0
    for a in range(4):
        for b in range(a):
            for name in run.rank_states[a].keys() & run.rank_states[b].keys():
                assert torch.equal(run.rank_states[a][name], run.rank_states[b][name]), (name, a, b)
                pairs += 1
    assert pairs >= len(run.state_dict()) - 1  # the tied head has one name more
