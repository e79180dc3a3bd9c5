"""Operations of experts under a load: exchanges, products and further rounds are those of runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import Mesh, Strategy, models, recipes
from piper_capture import region
from piper_ir.ground.codec import dumps, loads
from piper_ir.ground.errors import PiperError
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Compute
from piper_ir.program.program import Chunk, Step
from piper_ir.verify import verify
from piper_ops import grouped_mm, route, unroute
from piper_ops.experts import rounds
from piper_simulator import DeviceModel, load_cluster, work_of
from piper_simulator.durations.expert_work import loaded, messages
from tests.helpers.cases import each_case
from tests.helpers.large_experts import LARGE, of_experts
from tests.helpers.steered import (
    CHOICES,
    DEVICES,
    EXPERTS,
    HIDDEN,
    LOADS,
    TOKENS,
    TOP,
    WIDTH,
    preferred,
)
from tests.parity.test_dropless_experts import compiled, job, shared


def predicted(plan: Plan, load: float) -> Counter[int]:
    """Count the bytes of the all-to-alls inside of a step on one rank."""
    found: Counter[int] = Counter()
    for part in (p for instr in plan.roles[0].program for p in instr.parts):
        if not isinstance(part.op, Compute):
            continue
        sig = plan.chunk(part.op.chunk).steps[part.op.step]  # type: ignore[index]  # no B in a plan
        for one in sig.collectives:
            times, nbytes = messages(one, load, sig.experts)
            found.update({nbytes: times} if one.kind == "all_to_all" and times else {})
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("load", LOADS)
def test_all_to_alls_of_a_step_are_those_of_a_run(
    load: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads of the fullest device are even over the devices that send to it; several rounds may differ in their
    sizes."""
    plan, sent = compiled(load, Mesh(ep=DEVICES)).plan, Counter[int]()
    right = rounds._Rounds.__init__

    def counted(self: Any, exchange: Any, *rest: Any) -> None:
        def count(kind: str, axis: str, given: Tensor) -> Tensor:
            sent[given.nbytes] += 1
            return exchange(kind, axis, given)

        right(self, count, *rest)

    monkeypatch.setattr(rounds._Rounds, "__init__", counted)
    piper.execute(compiled(load, Mesh(ep=DEVICES)), steps=1, launcher="inline")
    even = max(LOADS[load]) / (sum(LOADS[load]) / DEVICES)
    further = predicted(plan, even) - predicted(plan, 1.0)
    assert sum(further.values()) == sum(sent.values()) / DEVICES
    assert sum(n * k for n, k in further.items()) == pytest.approx(
        sum(n * k for n, k in sent.items()) / DEVICES, rel=1e-3
    )
    assert (sum(sent.values()) > 0) == (load != "uniform")


@pytest.mark.parametrize("load", [1.0, 1.2, 1.5, 4.0])
def test_products_are_those_of_the_rows_of_the_fullest_device(load: float) -> None:
    """Forward once for each row, and again above the bound of 1.25: in I, and in W with the inner product's
    gradient."""
    chunk = of_experts(compiled("uniform", Mesh(ep=DEVICES)).plan)
    each, above = 2 * CHOICES * WIDTH * HIDDEN, max(0.0, load - 1.25)
    wanted = {"F": 2 * load, "I": 2 * load + 2 * above, "W": 2 * load + 3 * above}
    for step, factor in wanted.items():
        found = loaded(chunk, step, load)  # type: ignore[arg-type]  # steps by name
        flops = sum(int(k.flops) * k.count for k in found.kernels if "grouped" in k.op)
        assert flops == pytest.approx(factor * each, rel=1e-3), step
    first = next(k for k in loaded(chunk, "F", load).kernels if k.op == "grouped_mm")
    rows = round(min(load, 1.25) * CHOICES)
    assert first.dims == (rows, HIDDEN, WIDTH)
    assert (
        first.bytes
        == 8 * (rows * (HIDDEN + WIDTH) + EXPERTS // DEVICES * HIDDEN * WIDTH)
        + 8 * EXPERTS // DEVICES
    )


@pytest.mark.parametrize("load", [1.0, 2.0])
def test_software_without_places_sends_and_multiplies_the_rows_there_are(load: float) -> None:
    """Such software needs one round, and its backward computes none again. The plan has places for 1.25 times the mean."""
    plan = compiled("uniform", Mesh(ep=DEVICES)).plan
    usual = load_cluster(f"h100x{DEVICES}@hopper-megatron")
    assert usual.device.stack is not None
    in_places = replace(usual.device.stack, places="bound")
    sent, multiplied = list[int](), list[int]()
    for cluster in (usual, usual.each_device(lambda d: replace(d, stack=in_places))):
        model = DeviceModel(plan, cluster, None, loads=((load, 1.0),))
        program = plan.roles[0].program
        works = list(work_of(model, plan))[: len(program)]
        steps = [{p.op.step for p in i.parts if isinstance(p.op, Compute)} for i in program]
        forward = [work for work, step in zip(works, steps, strict=True) if "F" in step]
        inside = [m for work in forward for m in work.inside if m.op == "all_to_all"]
        sent.append(sum(m.bytes for m in inside))
        multiplied.append(sum(work.flops for work in works))
    rounds_too = max(1.25, load)  # the places of round 0, and the rows above them
    assert sent[0] / sent[1] == pytest.approx(load / rounds_too, rel=1e-3)
    assert multiplied[0] < multiplied[1] if load > 1.25 else multiplied[0] == multiplied[1]


@pytest.mark.long
@pytest.mark.parametrize("hidden", [16, 24])
def test_further_rounds_of_experts_as_wide_as_tokens_have_the_products_of_others(
    hidden: int,
) -> None:
    """W has three products of weights, and for rows above the bound a forward and the last product's gradient too."""
    small = models.job(
        replace(LARGE, width=16, length=16).with_experts(hidden=hidden),
        global_batch=4,
        precision="float32",
    )
    shared = (*recipes.expert_parallel(), *recipes.data_parallel(over=("ep",)))
    chunk, each = (
        of_experts(piper.compile(small, Strategy(Mesh(ep=2), shared)).plan),
        2 * 2 * 16 * 2 * 16 * hidden,
    )
    found = sum(
        int(k.flops) * k.count for k in loaded(chunk, "W", 1.5).kernels if "grouped" in k.op
    )
    assert found == pytest.approx((3 * 1.5 + 4 * 0.25) * each, rel=1e-3)


def test_what_a_device_does_with_tokens_of_its_own_depends_on_no_load() -> None:
    chunk = of_experts(compiled("uniform", Mesh(ep=DEVICES)).plan)

    def moved(step: Step, load: float) -> dict[str, int]:
        return dict(
            sum(
                (
                    Counter({k.op: int(k.bytes) * k.count})
                    for k in loaded(chunk, step, load).kernels
                ),
                Counter[str](),
            )
        )

    for step in ("F", "I"):
        even, full = moved(step, 1.0), moved(step, 2.5)
        own = {
            op
            for op in even
            if op.startswith(("route", "unroute", "experts_return", "experts_further"))
        }
        assert own and all(full[op] == even[op] for op in own)
        # a round of all places: as much as round 0, and in I the forward too
        again = {"F": {"experts_take": 2, "silu": 2}, "I": {"experts_take": 3, "silu_backward": 2}}[
            step
        ]
        assert {op: full[op] / even[op] for op in again} == pytest.approx(again)
    assert moved("F", 2.5)["experts_home"] > 0


class Stacked(nn.Module):
    """A mixture whose experts are some layers as wide as tokens; with other work in their region, or without."""

    def __init__(self, layers: int, *, beside: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ParameterList(torch.randn(EXPERTS, WIDTH, WIDTH) for _ in range(layers))
        self.register_buffer("chosen", preferred(LOADS["uniform"]))
        self.beside = beside

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.chosen.expand(x.shape[0], TOKENS, TOP).flatten(0, 1)
        tokens = self.first(x).flatten(0, 1)
        with region(experts=0):
            rows, counts = route(tokens, chosen, EXPERTS)
            of_all = self.shared(tokens) if self.beside else tokens
            share = self.router(of_all).softmax(-1).gather(1, chosen)
            for number, matrices in enumerate(self.layers):
                rows = grouped_mm(F.silu(rows) if number else rows, counts, matrices)
            mixed = unroute(rows, chosen, share)
        return x + (mixed + of_all).view_as(x)


class Gated(Stacked):
    """A mixture of two products of the rows, and one of what the first lets through of the second."""

    def __init__(self) -> None:
        super().__init__(3, beside=False)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.chosen.expand(x.shape[0], TOKENS, TOP).flatten(0, 1)
        tokens = self.first(x).flatten(0, 1)
        with region(experts=0):
            rows, counts = route(tokens, chosen, EXPERTS)
            share = self.router(tokens).softmax(-1).gather(1, chosen)
            gate, up, down = self.layers
            through = F.silu(grouped_mm(rows, counts, gate)) * grouped_mm(rows, counts, up)
            mixed = unroute(grouped_mm(through, counts, down), chosen, share)
        return x + mixed.view_as(x)


@cache
def stacked(layers: int, *, beside: bool = False) -> Chunk:
    return chunk_of(partial(Stacked, layers, beside=beside))


def chunk_of(model: Callable[[], nn.Module]) -> Chunk:
    work = replace(job("uniform"), model=model)
    strategy = Strategy(Mesh(ep=2), [shared(), *recipes.data_parallel(over=("ep",))])
    return of_experts(piper.compile(work, strategy).plan)


def of_a_round(chunk: Chunk, step: Step) -> Counter[str]:
    """Count the operators of a further round."""
    experts = chunk.steps[step].experts
    assert experts is not None
    return Counter({k.op: k.count for k in experts.round.kernels})


@pytest.mark.parametrize("layers", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 3))])
def test_a_further_round_makes_gradients_of_matrices_without_those_of_rows(layers: int) -> None:
    """However wide the layers are: here all products have the same sizes."""
    chunk = stacked(layers)
    products = {
        s: [of_a_round(chunk, s)[f"grouped_mm{of}"] for of in ("", "_dgrad", "_wgrad")]
        for s in chunk.steps
    }
    assert products == {
        "F": [layers, 0, 0],
        "I": [layers, layers, 0],
        "W": [layers, layers - 1, layers],
    }


@pytest.mark.long
def test_a_further_round_for_matrices_adds_up_no_gradients_of_rows() -> None:
    """Two products read the same rows: I adds their two gradients, and autograd makes neither for W."""
    chunk = chunk_of(Gated)
    backward, weights = of_a_round(chunk, "I"), of_a_round(chunk, "W")
    assert (backward["add"], weights["add"]) == (1, 0)
    assert (backward["grouped_mm_dgrad"], weights["grouped_mm_dgrad"]) == (3, 1)
    assert weights["silu_backward"] == backward["silu_backward"] == 1
    assert (weights["grouped_mm"], weights["grouped_mm_wgrad"]) == (3, 3)


@each_case("rows", [0, -4, [0, 4]])
def test_experts_of_an_edited_plan_have_rows(rows: Any) -> None:
    document = json.loads(dumps(compiled("uniform", Mesh(ep=DEVICES)).plan))
    verify(loads(Plan, json.dumps(document)))
    chunk = next(c for c in document["chunks"] if "experts" in c["steps"]["F"])
    chunk["steps"]["F"]["experts"]["rows"] = rows
    with pytest.raises(
        PiperError,
        match=r"(?s)steps\.F\.experts: an ExpertRegion has rows -?\d;|R37-experts.* step F has .* a plan has",
    ):
        verify(loads(Plan, json.dumps(document)))


@pytest.mark.long
def test_what_else_is_in_the_region_of_experts_is_in_no_further_round() -> None:
    """A router and a layer of all tokens stand between the sorting of rows and the experts; each runs once."""
    plain, more = stacked(2), stacked(2, beside=True)
    for step in plain.steps:
        assert of_a_round(plain, step) == of_a_round(more, step) != Counter()
        alone, both = (
            sum(k.count for k in chunk.steps[step].cost.kernels if k.kind == "matmul")
            for chunk in (plain, more)
        )
        assert both == alone + 1, "a control"


def test_products_for_gradients_of_rows_have_rows_first_in_any_step() -> None:
    """Where nothing before the experts is trained, W has these products, too."""
    chunk = of_experts(compiled("uniform", Mesh(ep=DEVICES)).plan)
    backward = replace(chunk.steps["W"].cost, kernels=chunk.steps["I"].cost.kernels)
    moved = replace(chunk, steps={**chunk.steps, "W": replace(chunk.steps["W"], cost=backward)})
    assert loaded(moved, "W", 1.0).kernels == loaded(chunk, "I", 1.0).kernels
