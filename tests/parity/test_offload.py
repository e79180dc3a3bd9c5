"""Protect that tensors which wait on the host change memory and time, and nothing of what is trained."""

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
from piper.views.explained.explain import explain
from piper_compiler import durations
from piper_compiler.directives import decided
from piper_ir.ground.errors import PlanError, SelectorError
from piper_ir.plan.plan import Part, Plan
from piper_ir.program.collectives import FROM_HOST, TO_HOST
from piper_ir.program.ops import Collective
from piper_ir.verify import check, verify
from piper_runtime.rank.binding.rank import Binder, Rank
from piper_runtime.rank.values.host import HostMemory
from piper_simulator import load_cluster
from tests.faults import host_faults
from tests.helpers import compositions, evaluated_jobs
from tests.helpers.compositions import Composition, expected, job_of, strategy_of
from tests.helpers.memory_judge import lies
from tests.helpers.parity import assert_parity

DEEP = Composition("deep", 2, 1, 4, "1f1b")
SHARED = Composition("gpt", 2, 2, 4, "1f1b", zero=3)


def made(c: Composition, *more: Any) -> Compiled:
    compositions.captured(c.model)
    strategy = strategy_of(c)
    return piper.compile(job_of(c), Strategy(strategy.mesh, (*strategy.directives, *more)))


@functools.cache
def moved(c: Composition = DEEP, **options: Any) -> Compiled:
    """A composition whose tensors wait on the host, however small they are."""
    return made(c, offload(where(), **{"least_mb": 0, **options}))


def kinds(plan: Plan) -> list[str]:
    ops = [instr.parts[0].op for _, _, instr in plan.instructions()]
    return [op.kind for op in ops if isinstance(op, Collective) and op.law.route == "host"]


def judged(c: Composition, launcher: str = "inline", **options: Any) -> Plan:
    """AssertionError unless a plan keeps the rules, trains like one device, and is right about memory."""
    compiled = moved(c, **options)
    plan = compiled.plan
    assert check(plan) == [] and kinds(plan).count(TO_HOST) == kinds(plan).count(FROM_HOST) > 0
    assert_parity(compositions.run(c, compiled, launcher=launcher), expected(c))
    record = compositions.run(c, compiled, steps=1, gradients=False, memory=True).memory
    assert lies(plan, dict(record)) == []
    assert all(record[role.ranks[0]].host == role.host_peak_bytes for role in plan.roles)
    return plan


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("c", "options"),
    [
        (DEEP, {}),
        (replace(DEEP, keep="inputs"), {"tensors": "inputs"}),
        (replace(DEEP, schedule="interleaved", chunks=2), {"prefetch": 2}),
        (replace(DEEP, placement="v", backward="split"), {"prefetch": 0}),
        (Composition("gpt", 2, 1, 4, "random", "random", seed=3), {}),
        (SHARED, {}),
        pytest.param(Composition("gpt", 1, 1, 2, "1f1b", tp=2), {}, marks=pytest.mark.long),
        pytest.param(
            Composition("llama", 1, 1, 2, "1f1b", cp=2, attention="ring"),
            {"tensors": "saved"},
            marks=pytest.mark.long,
        ),
        pytest.param(replace(DEEP, keep="attention"), {}, marks=pytest.mark.long),
        pytest.param(replace(DEEP, schedule="zbv"), {}, marks=pytest.mark.long),
        pytest.param(Composition("moe", 1, 2, 2, "gpipe"), {}, marks=pytest.mark.long),
        pytest.param(Composition("gpt_dropout", 2, 1, 4, "gpipe"), {}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_it_trains_like_one_device(c: Composition, options: dict[str, Any]) -> None:
    judged(c, **options)


@pytest.mark.long
def test_it_trains_like_one_device_in_processes() -> None:
    judged(DEEP, "processes")


def test_a_copy_that_is_not_made_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the copies to the host, numbers come back that are none of the model's."""
    operand = Rank.binder.operand

    def lost(part: Part, rank: Any) -> Any:
        if isinstance(part.op, Collective) and part.op.kind == TO_HOST:
            return lambda: rank.store.values[part.writes[0]].zero_()
        return operand(part, rank)

    monkeypatch.setattr(Rank, "binder", Binder(operand=lost))
    with pytest.raises(AssertionError, match="not what one device computes"):
        assert_parity(compositions.run(DEEP, moved()), expected(DEEP))


def activations(plan: Plan) -> list[int]:
    return [role.peak_by_category.get("activation", 0) for role in plan.roles]


def test_activations_leave_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all forwards come first, most tensors wait on the host, if the link keeps up with compute."""
    c = replace(DEEP, schedule="gpipe")
    without, slow = made(c).plan, moved(c).plan
    monkeypatch.setattr(durations, "HOST_LINK", 1e15)
    fast = made(c, offload(where(), least_mb=0)).plan
    before, after = activations(without), activations(fast)
    assert all(a < b / 2 for a, b in zip(after, before, strict=True)), (before, after)
    assert all(a <= b for a, b in zip(activations(slow), before, strict=True))
    assert all(role.host_peak_bytes > 0 for role in fast.roles)
    assert all(role.host_peak_bytes == 0 for role in without.roles)


def test_a_tensor_is_freed_before_its_memory_is_taken_again() -> None:
    """However slow the link is: no tensor has two places on the device."""
    for role in moved().plan.roles:
        program, on_device = list(role.program), set[str]()
        names = {i.parts[0].reads[0]: i.parts[0].writes[0] for i in program if i.stream == TO_HOST}
        back = {names_[0]: names_[1] for i in program if i.stream == FROM_HOST
                for names_ in [(i.parts[0].reads[0], i.parts[0].writes[0])]}  # fmt: skip
        pairs = {original: back[copy] for original, copy in names.items()}
        for instr in (i for i in program if not i.comm):
            on_device -= {*instr.frees_before}
            for part in instr.parts:
                on_device = (on_device | {*part.writes}) - {*part.frees}
            on_device |= {*instr.allocs_after}
            assert not [v for v, w in pairs.items() if v in on_device and w in on_device]


def test_small_tensors_and_the_last_layers_stay() -> None:
    """A plan without copies is the plan without the directive."""
    plain = made(DEEP).plan
    assert moved(least_mb=1.0).plan.key == plain.key
    assert moved(prefetch=100).plan.key == plain.key
    last = [p.node for i in moved().plan.roles[1].program if i.stream == TO_HOST for p in i.parts]
    assert any("layer4" in node for node in last) and not any("root.1" in node for node in last)


def test_only_selected_chunks_move() -> None:
    """An activation stays if the backward of another chunk reads it."""
    plan = made(DEEP, offload(where(layer=(1, 2)), least_mb=0)).plan
    nodes = [i.parts[0].node for _, _, i in plan.instructions() if i.stream == TO_HOST]
    assert nodes and all(
        "layer1" in node or "layer2" in node or "layer0:out" in node for node in nodes
    )
    assert check(plan) == []


def test_tensors_of_some_modules_move() -> None:
    """The ones that are made inside of them, also under a policy that keeps some of these."""
    c = Composition("gpt", 1, 1, 2, "gpipe")
    norms = judged(c, modules="*.norm[12]")
    every = saved_ports(moved(c).plan)
    inside = saved_ports(norms)
    assert 0 < len(inside) < len(every) and inside < every
    both = made(
        c,
        piper.recompute(where(), keep="products"),
        offload(where(), least_mb=0, modules=("*.qkv", "*.norm[12]")),
    )
    assert check(both.plan) == [] and 0 < len(saved_ports(both.plan)) < len(inside)


def saved_ports(plan: Plan) -> set[str]:
    """The saved tensors that move, without microbatches."""
    moves = (i.parts[0] for _, _, i in plan.instructions() if i.stream == TO_HOST)
    return {part.reads[0].partition("@")[0] for part in moves if ":saved" in part.reads[0]}


def test_an_evaluation_moves_nothing() -> None:
    """It has no backward, and its chunks have no variants that tell the tensors of modules."""
    directives = (
        *recipes.one_f_one_b(pp=2, microbatches=2),
        offload(where(), least_mb=0, modules="layers.*"),
    )
    compiled = piper.compile(evaluated_jobs.job(), Strategy(Mesh(pp=2), directives))
    assert compiled.evaluation is not None
    assert kinds(compiled.plan) and not kinds(compiled.evaluation.plan)


REFUSED = (
    (1, [offload(where(phase="F"))], "is not selected, but others of its chunk are"),
    (1, [offload(where(mb=(0, 1)))], "is not selected"),
    (
        2,
        [offload(where(), tensors="weights")],
        "'all', 'saved', 'inputs', 'optim', 'states' are accepted",
    ),
    (3, [offload(where(), prefetch=-1)], "prefetch=-1; an integer of at least 0"),
    (3, [offload(where(), prefetch=True)], "prefetch=True; an integer"),
    (3, [offload(where(), least_mb=float("nan"))], "least_mb=nan; a number of MiB"),
    (4, [offload(where(layer=0)), offload(where())], "layer0 is offloaded already"),
    (8, [offload(where(), modules=("",))], "names of modules such as"),
    (8, [offload(where(), modules="*", tensors="inputs")], "are made by other layers"),
)


@pytest.mark.parametrize(("condition", "items", "says"), REFUSED)
def test_conditions(condition: int, items: list[Any], says: str) -> None:
    with pytest.raises(DirectiveError, match=rf"{says}.*\[offload condition {condition}\]"):
        made(DEEP, *items)


def test_what_has_no_tensors_to_move_is_refused() -> None:
    with pytest.raises(DirectiveError, match=r"synthetic.*\[offload condition 5\]"):
        piper.compile(
            piper.synthetic(stages=2, F=1, I=1, W=1),
            Strategy(Mesh(pp=2), (*recipes.gpipe(pp=2, microbatches=2), offload(where()))),
        )
    with pytest.raises(DirectiveError, match=r"is opaque.*\[offload condition 6\]"):
        made(Composition("opaque", 1, 1, 2, "gpipe"), offload(where()))
    with pytest.raises(
        DirectiveError, match=r'no tensor of the kind "saved".*\[offload condition 7\]'
    ):
        made(replace(DEEP, keep="inputs"), offload(where(layer=1), tensors="saved"))


def test_modules_that_do_not_run_are_named() -> None:
    with pytest.raises(SelectorError, match=r"modules='\*.mlp': no module matches"):
        made(DEEP, offload(where(), modules="*.mlp"))


def test_a_search_has_no_bound_of_its_memory() -> None:
    """Bounds count the tensors of microbatches in flight, and states; these are on the host here."""
    asked = decided(offload(where()))
    assert asked is not None and asked.away
    assert decided(offload(where(), tensors="optim")) is None


def test_a_strategy_with_it_is_saved_and_read(tmp_path: Path) -> None:
    item = offload(where(layer=1), prefetch=2, tensors="saved", least_mb=0.5, modules="*.mlp")
    strategy = Strategy(Mesh(pp=2), (*recipes.gpipe(pp=2, microbatches=2), item))
    piper.save_strategy(strategy, tmp_path / "strategy.json")
    assert piper.load_strategy(tmp_path / "strategy.json") == strategy


# --- the rule, and plans that break it


def wrong_peak(plan: Plan) -> Plan:
    """The plan states other bytes on the host."""
    first, *others = plan.roles
    return replace(plan, roles=(replace(first, host_peak_bytes=first.host_peak_bytes - 4), *others))


BROKEN = (
    (host_faults.original_read_on, "R38-host", "has copied to the host"),
    (host_faults.copy_left_behind, "R38-host", "which nothing brings back"),
    (host_faults.read_on_the_host, "R38-host", "which is on the host"),
    (
        host_faults.read_before_back,
        "R13-read-after-write",
        "no wait makes this instruction come after",
    ),
    (host_faults.freed_before_copied, "R16-free-covered", "without having waited"),
    (wrong_peak, "R28-peak", "bytes on the host"),
    (host_faults.copied_by_two, "R38-host", "of 2 ranks; a rank copies alone"),
)


@pytest.mark.parametrize(("edit", "rule", "says"), BROKEN)
def test_a_broken_plan_is_refused(edit: Any, rule: str, says: str) -> None:
    plan = edit(moved(SHARED if edit is host_faults.copied_by_two else DEEP).plan)
    assert plan is not None
    assert any(says in str(v) for v in check(plan) if v.rule == rule)
    with pytest.raises(PlanError):
        verify(plan)


# --- the host, as a run and as a simulation have it


def test_buffers_of_the_host_are_used_again() -> None:
    host = HostMemory(torch.device("cpu"))
    first = host.take((2, 3), torch.float32)
    place = first.data_ptr()
    assert (host.live, host.peak) == (24, 24)
    del first
    second = host.take((6,), torch.float32)
    assert second.data_ptr() == place and (host.live, host.peak) == (24, 24)
    third = host.take((6,), torch.float32)
    assert third.data_ptr() != place and (host.live, host.peak) == (48, 48)
    del second, third
    host.begin()
    assert (host.live, host.peak) == (0, 0)


def test_the_memory_of_a_node_is_shared_by_its_devices() -> None:
    """Copies of two stages slow each other on one node, not on two; a link that is slow slows all."""
    plan = moved(replace(DEEP, schedule="gpipe")).plan

    def cluster(nodes: int, **links: float) -> Any:
        of = load_cluster(f"h100x{2 // nodes}*{nodes}")
        return of.each_links(lambda one: replace(one, host_latency=0.0, **links))

    slow = dict(host_bandwidth=1e8, host_memory_bandwidth=1e8)
    alone, beside = (piper.simulate(plan, cluster(n, **slow)).step_s for n in (2, 1))
    assert beside > 1.2 * alone
    roomy = dict(slow, host_memory_bandwidth=1e12)
    assert piper.simulate(plan, cluster(1, **roomy)).step_s < beside / 1.2
    free = dict(host_bandwidth=1e12, host_memory_bandwidth=1e13)
    assert piper.simulate(plan, cluster(1, **free)).step_s < alone / 2


def test_predictions_tell_the_memory_of_the_host() -> None:
    compiled = moved()
    peaks = [role.host_peak_bytes for role in compiled.plan.roles]
    simulation = piper.simulate(compiled.plan, "h100x8")
    assert simulation.host_bytes == tuple(peaks)
    assert simulation.summary()["host_bytes"] == sum(peaks) and "fullest host" in repr(simulation)
    lines = simulation.memory(0)
    assert lines["activations"] > 0 and sum(lines.values()) == simulation.device_bytes[0]
    small = load_cluster("h100x8").each_links(lambda one: replace(one, host_memory_bytes=1000))
    assert any("the host of node 0 needs" in n for n in piper.simulate(compiled.plan, small).notes)
    text = explain(compiled)
    assert "in the memory of the host at most" in text and "wait for their backward" in text
