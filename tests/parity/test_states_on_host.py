"""Protect that states on the host change memory and time, and no parameter after training."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import piper
from piper import DirectiveError, Mesh, Strategy, offload, recipes, where
from piper.api.compiling.compiling import Compiled
from piper_ir.ground.errors import CompileError
from piper_ir.plan.plan import Plan
from piper_ir.program.collectives import FROM_HOST
from piper_ir.program.ops import Update
from piper_ir.verify import check
from piper_runtime.rank.values.store import Store
from piper_simulator import load_cluster
from tests.helpers import compositions
from tests.helpers.compositions import Composition, expected, job_of, strategy_of
from tests.helpers.memory_judge import lies
from tests.helpers.parity import assert_parity
from tests.helpers.plan_edits import first_part

DEEP = Composition("deep", 2, 1, 4, "1f1b", optimizer="adamw", clip=0.3, scheduler=True)
SHARED = replace(DEEP, dp=2, zero=3, clip=None)
TENSOR = Composition(
    "gpt", 1, 2, 2, "gpipe", tp=2, stream="tokens", precision="narrow messages", bucket_mb=0.002
)
EXPERTS = Composition("moe", 1, 2, 2, "gpipe", ep=2, precision="narrow messages", bucket_mb=0.002)
"""Shared chunks and shared experts, whose gradients are summed in another dtype than they are sent in."""
ALL = where()


@functools.cache
def hosted(c: Composition = DEEP, *selections: Any, tensors: str = "optim") -> Compiled:
    compositions.captured(c.model, c.precision)
    strategy = strategy_of(c)
    items = [offload(s, tensors=tensors) for s in selections or (ALL,)]
    return piper.compile(job_of(c), Strategy(strategy.mesh, (*strategy.directives, *items)))


def states(plan: Plan, *, host: bool) -> dict[str, int]:
    """Bytes by category over all roles."""
    found: dict[str, int] = {}
    for role in plan.roles:
        for s in role.states:
            if s.host == host:
                found[s.category] = found.get(s.category, 0) + s.nbytes
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("c", "selections"),
    [
        (DEEP, ()),
        (DEEP, (where(layer=0),)),
        (SHARED, ()),
        (replace(SHARED, zero=1, precision="mixed", pp=1), ()),
        (replace(DEEP, optimizer="rmsprop", scheduler=False), ()),
        (replace(DEEP, optimizer="adafactor", clip=None, pp=1), ()),
        (replace(SHARED, pp=1, zero=2), (where(layer=(0, 1)),)),
        (replace(SHARED, pp=1, zero=2, precision="narrow sums"), ()),
        pytest.param(replace(DEEP, precision="mixed", scaled=True), (), marks=pytest.mark.long),
        pytest.param(
            Composition("gpt", 1, 1, 2, "1f1b", tp=2, stream="tokens"), (), marks=pytest.mark.long
        ),
        pytest.param(Composition("moe", 1, 2, 2, "gpipe", ep=2), (), marks=pytest.mark.long),
        pytest.param(replace(TENSOR, zero=1), (), marks=pytest.mark.long),
        pytest.param(EXPERTS, (), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_it_trains_like_one_device(c: Composition, selections: tuple[Any, ...]) -> None:
    compiled = hosted(c, *selections)
    assert set(states(compiled.plan, host=True)) == {"master", "optim"}
    judge(c, compiled)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "c",
    [
        SHARED,
        replace(DEEP, optimizer="sgd"),
        replace(SHARED, precision="mixed", pp=1, whole_mb=0.001, prefetch=2),
        replace(SHARED, precision="narrow sums", schedule="zb1p", resident_mb="step"),
        pytest.param(replace(SHARED, pp=1, zero=0, precision="mixed"), marks=pytest.mark.long),
        pytest.param(Composition("moe", 1, 2, 2, "gpipe", ep=2, zero=3), marks=pytest.mark.long),
        pytest.param(
            Composition("gpt", 1, 2, 2, "1f1b", tp=2, stream="tokens", zero=3),
            marks=pytest.mark.long,
        ),
        replace(TENSOR, zero=3),
        pytest.param(replace(EXPERTS, zero=3), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_parameters_on_the_host_train_like_one_device(c: Composition) -> None:
    compiled = hosted(c, tensors="states")
    assert states(compiled.plan, host=True)["param"] > 0
    judge(c, compiled)


def judge(c: Composition, compiled: Compiled) -> None:
    """Compare with one device, and the memory with the plan; in mixed precision with states on the device."""
    plan = compiled.plan
    assert check(plan) == []
    found = compositions.run(c, compiled)
    if c.precision == "float64":
        assert_parity(found, expected(c))
    else:  # the casts are those of a run with its optimizer on the device, to the bit
        there = compositions.run(c, compositions.compiled(c))
        assert found.losses == there.losses and found.rank_states.keys() == there.rank_states.keys()
        for rank, tensors in found.rank_states.items():
            assert all(torch.equal(t, there.rank_states[rank][n]) for n, t in tensors.items())
    record = compositions.run(c, compiled, steps=1, gradients=False, memory=True).memory
    assert lies(plan, dict(record)) == []


def test_an_update_that_does_not_come_back_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the copy to the device, it goes on with the first parameters."""
    monkeypatch.setattr(Store, "copy_masters", lambda self, buckets: None)
    with pytest.raises(AssertionError, match="not what one device computes"):
        assert_parity(compositions.run(DEEP, hosted()), expected(DEEP))


def test_a_stale_parameter_on_the_host_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: where updates do not reach the copies that are gathered, all steps use the first parameters."""
    c = replace(SHARED, pp=1, precision="mixed")
    right = compositions.run(c, hosted(c, tensors="states")).losses
    monkeypatch.setattr(Store, "copy_masters", lambda self, buckets: None)
    stale = compositions.run(c, hosted(c, tensors="states")).losses
    assert stale[0] == right[0] and stale[1] != right[1]


def test_a_gather_of_another_shard_is_refused() -> None:
    plan = hosted(replace(SHARED, pp=1, bucket_mb=0.001), tensors="states").plan
    size = {b.id: b.numel for b in plan.buckets}
    first, other = next((a, b) for a in size for b in size if a != b and size[a] == size[b])
    broken = first_part(
        plan,
        lambda _, part: getattr(part.op, "kind", "") == FROM_HOST and part.op.bucket == first,
        lambda part: replace(part, op=replace(part.op, bucket=other)),
    )
    assert broken is not None
    assert any("no copy of its shard" in str(v) for v in check(broken))


def test_parameters_that_ranks_update_in_parts_and_hold_whole_stay() -> None:
    with pytest.raises(
        CompileError, match=r"use zero=3, zero=0 or tensors=.* \[offload condition 10\]"
    ):
        hosted(replace(SHARED, zero=1), tensors="states")


def test_the_device_keeps_parameters_and_gradients() -> None:
    """AdamW in float64 keeps 16 bytes per parameter beside a master of 8; with a part of the layers, a part of that."""
    own = states(compositions.compiled(DEEP).plan, host=False)
    here, there = (states(hosted().plan, host=h) for h in (False, True))
    assert here == {"param": own["param"], "grad": own["grad"]}
    assert there == {"master": own["param"], "optim": own["optim"]}
    part = states(hosted(DEEP, where(layer=0)).plan, host=True)
    assert 0 < part["optim"] < there["optim"]
    fewer = sum(r.peak_bytes for r in hosted().plan.roles)
    assert fewer == sum(r.peak_bytes for r in compositions.compiled(DEEP).plan.roles) - own["optim"]
    streamed = hosted(DEEP, tensors="states").plan
    assert states(streamed, host=False) == {"grad": own["grad"]}
    assert states(streamed, host=True) == {"param": own["param"], "optim": own["optim"]}


REFUSED = (
    (1, [offload(where(phase="F"), tensors="optim")], "is not selected"),
    (4, [offload(where(layer=0), tensors="optim"), offload(where(), tensors="optim")], "already"),
    (9, [offload(where(), tensors="optim", prefetch=2)], "prefetch beside tensors="),
    (9, [offload(where(), tensors="states", modules="*", least_mb=0)], "least_mb, modules beside"),
)


@pytest.mark.parametrize(("condition", "items", "says"), REFUSED)
def test_conditions(condition: int, items: list[Any], says: str) -> None:
    strategy = strategy_of(DEEP)
    with pytest.raises(DirectiveError, match=rf"{says}.*\[offload condition {condition}\]"):
        piper.compile(job_of(DEEP), Strategy(strategy.mesh, (*strategy.directives, *items)))


def test_a_plan_with_states_in_the_wrong_memory_is_refused() -> None:
    plan = hosted().plan
    role = plan.roles[0]
    moved = tuple(replace(s, host=False) if s.category == "master" else s for s in role.states)
    broken = replace(plan, roles=(replace(role, states=moved), *plan.roles[1:]))
    assert any("is to be on the host" in str(v) for v in check(broken) if v.rule == "R08-states")


def test_an_update_that_says_too_little_memory_of_the_host_is_refused() -> None:
    plan = hosted().plan
    broken = first_part(
        plan,
        lambda _, part: isinstance(part.op, Update),
        lambda part: replace(part, op=replace(part.op, host_workspace=part.op.host_workspace - 4)),
    )
    assert broken is not None
    said = [str(v) for v in check(broken) if v.rule == "R28-peak"]
    assert any("bytes of copies on the host" in text for text in said)


def test_a_tied_weight_is_updated_in_one_place() -> None:
    tied = Composition("gpt", 2, 1, 2, "gpipe")
    with pytest.raises(CompileError, match=r"parameter '.*' is of .* select both"):
        hosted(tied, where(stage=0))


def test_a_checkpoint_is_read_with_and_without_it(tmp_path: Path) -> None:
    """Two steps run on the host and are saved; two more, here or there, have the losses of four on the device."""
    four = compositions.run(DEEP, compositions.compiled(DEEP), steps=4)
    saved = piper.Checkpoints(tmp_path, every=2)
    compositions.run(DEEP, hosted(), steps=2, checkpoint=saved)
    for again in (compositions.compiled(DEEP), hosted(), hosted(tensors="states")):
        rest = compositions.run(DEEP, again, steps=2, resume=tmp_path / "step-00000002")
        assert rest.losses == pytest.approx(four.losses[2:], rel=1e-12)


def test_the_host_takes_its_time() -> None:
    """Gradients and parameters cross the link, states are in the memory that the devices of a node share."""

    def step_s(plan: Plan, per_node: int = 2, **links: float) -> float:
        cluster = load_cluster(f"h100x{per_node}*{2 // per_node}")
        return piper.simulate(plan, cluster.each_links(lambda of: replace(of, **links))).step_s

    here, there = compositions.compiled(DEEP).plan, hosted().plan
    role = max(there.roles, key=lambda r: sum(s.nbytes for s in r.states))
    sizes = {s.category: 0 for s in role.states}
    for s in role.states:
        sizes[s.category] += s.nbytes
    link = dict(host_latency=0.0, host_bandwidth=1e6, host_memory_bandwidth=1e15)
    crossing = (sizes["grad"] + sizes["param"]) / 1e6
    assert step_s(there, **link) - step_s(here) == pytest.approx(crossing, rel=0.02)
    memory = dict(host_latency=0.0, host_bandwidth=1e15, host_memory_bandwidth=1e6)
    # Gradients are multiplied first, as they are clipped: read and written once more.
    passes = 2 * sizes["master"] + 3 * sizes["grad"] + 2 * sizes["optim"]
    touched = (passes + sizes["grad"] + sizes["param"]) / 1e6
    assert step_s(there, 1, **memory) - step_s(here, 1) == pytest.approx(touched, rel=0.02)
    assert step_s(there, 2, **memory) > 1.9 * step_s(there, 1, **memory)


def test_a_host_that_updates_launches_nothing_meanwhile() -> None:
    """Steps that wait for their host are longer by its update, also when they follow each other."""
    cluster = load_cluster("h100x2@hopper-megatron").each_links(
        lambda of: replace(of, host_latency=0.0, host_bandwidth=1e7, host_memory_bandwidth=1e15)
    )
    here, there = (
        piper.simulate(plan, cluster) for plan in (compositions.compiled(DEEP).plan, hosted().plan)
    )
    update_s = there.step_s - here.step_s
    assert update_s > 0.1 * here.step_s
    assert there.period_s - here.period_s == pytest.approx(update_s, rel=0.05)


def test_a_strategy_with_it_is_saved_and_read(tmp_path: Path) -> None:
    item = offload(where(layer=1), tensors="optim")
    strategy = Strategy(Mesh(pp=2), (*recipes.gpipe(pp=2, microbatches=2), item))
    piper.save_strategy(strategy, tmp_path / "strategy.json")
    assert piper.load_strategy(tmp_path / "strategy.json") == strategy
