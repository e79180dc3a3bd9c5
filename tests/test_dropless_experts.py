"""Devices that share the experts of a dropless mixture compute what one device computes, whatever tokens choose."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import ANY, Mesh, Precision, Strategy, models, recipes, where
from piper.api.compiling import Compiled
from piper_ir.errors import DirectiveError, RankError
from piper_ir.layout import DimPart
from piper_ir.verify import verify
from piper_ops import DIRECT, grouped_mm, grouped_mm_wgrad, rounds, route, unroute
from piper_runtime.launch.processes import Pool
from tests import expert_loops, parity
from tests.test_memory_truth import lies

WIDTH, HIDDEN, EXPERTS, TOP, TOKENS, DEVICES = 8, 12, 8, 2, 16, 4
LOADS: dict[str, tuple[int, ...]] = {
    "uniform": (8, 8, 8, 8),
    "1.5": (12, 8, 6, 6),
    "2": (16, 6, 6, 4),
    "all to one": (32, 0, 0, 0),
}
"""Of the 32 choices that a row makes, how many each of 4 devices gets."""


MIXTURE = models.MoEConfig(
    layers=2, width=16, heads=4, kv_heads=2, head_dim=6, hidden=24, vocab=32, length=8, experts=4, top_k=2, capacity_factor=None
)


def preferred(load: tuple[int, ...]) -> Tensor:
    """The two experts of each token, so that devices get so many choices; a token's are different."""
    first, second = [], []
    for device, choices in enumerate(load):
        first += [2 * device] * (choices // 2)
        second += [2 * device + 1] * (choices // 2)
    return torch.tensor([first, second]).t().contiguous()


class Steered(nn.Module):
    """A mixture whose tokens choose by their places, and share out by a router."""

    def __init__(self, load: tuple[int, ...]) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up, self.down = (nn.Parameter(0.3 * torch.randn(EXPERTS, *s)) for s in ((WIDTH, HIDDEN), (HIDDEN, WIDTH)))
        self.register_buffer("chosen", preferred(load))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.chosen.expand(x.shape[0], TOKENS, TOP).flatten(0, 1)
        tokens = x.flatten(0, 1)
        share = self.router(tokens).softmax(-1).gather(1, chosen)
        with piper.region(experts=0):
            rows, counts = route(tokens, chosen, EXPERTS)
            made = unroute(grouped_mm(F.silu(grouped_mm(rows, counts, self.up)), counts, self.down), chosen, share)
        return x + made.view_as(x)


class SteeredMixture(nn.Module):
    def __init__(self, load: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Steered(LOADS[load]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    drawn = torch.stack([torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(99 * step + r)) for r in rows])
    return drawn, drawn.roll(1, dims=1)


@functools.cache
def job(load: str) -> piper.Job:
    model = functools.partial(SteeredMixture, load)
    precision = Precision(params="float64")
    return piper.Job(
        model,
        batch,
        F.mse_loss,
        expert_loops.optimizer,
        global_batch=8,
        precision=precision,
        clip_norm=0.1,
        tokens_per_row=TOKENS,
    )


@functools.cache
def expected(load: str, replicas: int, microbatches: int) -> parity.Reference:
    return parity.reference(job(load), replicas=replicas, microbatches=microbatches, steps=2)


def shared(**more: Any) -> Any:
    return piper.shard(where(experts=ANY), over="ep", index="experts", stream="rows", **more)


@functools.cache
def compiled(load: str, mesh: Mesh, *directives: Any, zero: int = 0, **more: Any) -> Compiled:
    rows = recipes.data_parallel(over=("dp", "ep"), zero=zero)
    return piper.compile(job(load), Strategy(mesh, [shared(**more), *directives, *rows]))


def run(made: Compiled, **more: Any) -> Any:
    return piper.execute(made, steps=2, gradients=True, **{"launcher": "inline", **more})


def assert_right(load: str, made: Compiled, **more: Any) -> Any:
    verify(made.plan)
    found = run(made, **more)
    parity.assert_parity(found, expected(load, made.plan.replicas, made.plan.microbatches))
    assert not lies(made.plan, found.memory)
    return found


@pytest.mark.parametrize("load", [pytest.param(load, marks=[pytest.mark.long] * (load == "1.5")) for load in LOADS])
def test_every_load_trains_what_one_device_trains_in_the_memory_of_the_plan(load: str) -> None:
    """Places for 10 rows from each device in a row of tokens: one round, two, two, and four."""
    made = compiled(load, Mesh(ep=DEVICES))
    found = assert_right(load, made)
    assert {record.peak for record in found.memory.values()} == {made.plan.roles[0].peak_bytes}


def test_a_device_has_its_experts_and_reduces_the_rest() -> None:
    made = compiled("uniform", Mesh(ep=DEVICES))
    layouts = {p.name: p.layout for p in made.plan.params}
    assert layouts["layers.0.up"] == layouts["layers.0.down"] == (DimPart("ep", 0),)
    assert layouts["layers.0.router.weight"] == ()
    chunk = next(c for c in made.plan.chunks if c.experts)
    sizes = {step: [(c.kind, c.nbytes) for c in sig.collectives] for step, sig in chunk.steps.items()}
    rows = DEVICES * 2 * 10 * WIDTH * 8  # places for 2 rows of tokens, in float64
    both = [("all_to_all", rows)] * 2
    assert sizes["F"] == [("all_gather", DEVICES * EXPERTS * 8), *both, ("all_to_all", 0)]
    assert sorted(sizes["I"]) == [("all_to_all", 0), *both] and sizes["W"] == [("all_to_all", 0)]


COMPOSED: dict[str, tuple[Mesh, list[Any], dict[str, Any]]] = {
    "dp, split backward": (Mesh(ep=2, dp=2, pp=2), [recipes.zb_h1(pp=2, microbatches=2)], {}),
    "zero 3, two microbatches": (Mesh(ep=4), [piper.split(where(), microbatches=2)], {"zero": 3}),
    "recompute": (Mesh(ep=4), [piper.recompute(where(), keep="inputs")], {}),
    "1f1b, zero 1": (Mesh(ep=2, pp=2), [recipes.one_f_one_b(pp=2, microbatches=4)], {"zero": 1}),
    "a small bound": (Mesh(ep=4), [], {"bound": 0.3}),
    "a large bound": (Mesh(ep=4), [], {"bound": 100.0}),
}
LONG = ("recompute", "zero 3, two microbatches", "1f1b, zero 1", "a small bound", "a large bound")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in LONG)) for n in COMPOSED])
def test_it_composes(name: str) -> None:
    mesh, directives, more = COMPOSED[name]
    assert_right("2", compiled("2", mesh, *directives, **more))


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["zbv", "dualpipe_v"])
def test_a_model_with_attention_whose_heads_are_shared(schedule: str) -> None:
    work = models.job(replace(MIXTURE, layers=4), global_batch=8, precision="float64", lr=0.01, clip_norm=0.05)
    pipeline = getattr(recipes, schedule)(pp=2, microbatches=2 if schedule == "zbv" else 4)
    rows = recipes.data_parallel(over=("dp", "ep"))
    made = piper.compile(work, Strategy(Mesh(ep=2, tp=2, pp=2), [shared(bound=0.7), piper.shard(where()), *pipeline, *rows]))
    verify(made.plan)
    found = run(made)
    head = made.plan.chunks[-1].id
    parity.assert_parity(found, parity.reference(work, replicas=2, microbatches=made.plan.microbatches, steps=2, head=head))
    assert not lies(made.plan, found.memory)


def test_tokens_in_parts_are_refused() -> None:
    with pytest.raises(DirectiveError, match=r"is a dropless mixture whose experts devices share, which needs all tokens"):
        compiled("2", Mesh(ep=2, tp=2), piper.shard(where(), stream="tokens"))


@pytest.mark.long
def test_in_processes(pool: Pool) -> None:
    assert_right("all to one", compiled("all to one", Mesh(ep=2)), launcher="processes", pool=pool)


def test_too_few_places_end_a_run_with_the_bound_that_would_do() -> None:
    """Two devices: 16 rows of each row of tokens would go to each other one, all 32 do."""
    made = compiled("all to one", Mesh(ep=2), overflow="error")
    with pytest.raises(RankError, match=r"rank \d, step 0.*layer0_experts0.F@0: a device has .* bound=2 would do") as error:
        run(made)
    assert "rounds" in str(error.value)
    assert_right("all to one", compiled("all to one", Mesh(ep=2), overflow="error", bound=2.0))


def test_what_is_dropped_is_the_end_of_a_row_and_the_same_each_time() -> None:
    """One device of two gets all: 20 of 32 choices of a row of tokens have places, those of its first 10 tokens."""
    made = compiled("all to one", Mesh(ep=2), piper.split(where(), microbatches=4), overflow="drop")
    first, again = run(made), run(made)
    assert first.losses == again.losses
    whole = Steered.forward

    def dropped(self: Steered, x: Tensor) -> Tensor:
        return torch.cat([whole_of(self, x)[:, :10], x[:, 10:]], dim=1)

    def whole_of(self: Steered, x: Tensor) -> Tensor:
        return whole(self, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Steered, "forward", dropped)
        parity.assert_parity(first, parity.reference(job("all to one"), replicas=2, microbatches=4, steps=2))


def shifted_counts(right: Any) -> Any:
    """Counts transposed: what device s has for device d, and what d has for s."""

    def by_expert(table: Tensor, *rest: Any) -> Any:
        return right(table.view(DEVICES, DEVICES, -1).transpose(0, 1).reshape(table.shape), *rest)

    return by_expert


def empty_experts_untouched(right: Any) -> Any:
    def wgrad(rows: Tensor, counts: Tensor, grad: Tensor) -> Tensor:
        return right(rows, counts, grad).index_fill(0, (counts == 0).nonzero().flatten(), 0.5)

    return wgrad


FAULTS: dict[str, tuple[Any, Any, Any]] = {
    "counts transposed": (rounds, "_by_expert", shifted_counts),
    "a round lost": (rounds, "round_count", lambda right: lambda table, slot: max(1, right(table, slot) - 1)),
    "a round too many for one's own": (rounds, "_send", lambda right: lambda *a: right(*a[:4], max(0, a[4] - 1))),
    "results of another device": (rounds, "_home", lambda right: lambda back, *rest: right(back.flip(0), *rest)),
    "rows in the order in which they came": (
        rounds, "_give", lambda right: lambda made, table, *rest: made.view(DEVICES, -1, made.shape[1]),
    ),
    "combined without shares": (DIRECT, unroute, lambda right: lambda rows, chosen, share: right(rows, chosen, share * 0 + 0.5)),
    "an expert without tokens has no gradient": (DIRECT, grouped_mm_wgrad, empty_experts_untouched),
    "rows without the gradient of further rounds": (
        rounds.ROUNDS, rounds.experts_return_dgrad, lambda right: lambda *a: torch.zeros_like(a[2]),
    ),
    "matrices without the gradient of further rounds": (
        rounds.ROUNDS, rounds.experts_return_wgrad, lambda right: lambda *a: [torch.zeros_like(w) for w in a[4]],
    ),
}  # fmt: skip


OFTEN = ("counts transposed", "a round lost", "combined without shares", "an expert without tokens has no gradient")


@pytest.mark.parametrize("fault", [pytest.param(f, marks=[pytest.mark.long] * (f not in OFTEN)) for f in FAULTS])
def test_a_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, wrong = FAULTS[fault]
    made = compiled("all to one", Mesh(ep=DEVICES))
    if isinstance(place, dict):
        monkeypatch.setitem(place, name, wrong(place[name]))
    else:
        monkeypatch.setattr(place, name, wrong(getattr(place, name)))
    found = run(made)
    assert parity.differences(parity.RunOutcome.of(found), expected("all to one", DEVICES, 1)), fault


@pytest.mark.parametrize(
    ("load", "directive", "message"),
    [
        ("2", dict(bound=0), r"bound=0; a positive number"),
        ("2", dict(bound="2"), r"bound='2'; a positive number"),
        ("2", dict(overflow="wait"), r"overflow='wait'; 'rounds', 'error', 'drop' are accepted"),
    ],
)
def test_what_is_not_legal_is_refused(load: str, directive: dict[str, Any], message: str) -> None:
    with pytest.raises(DirectiveError, match=message):
        compiled(load, Mesh(ep=2), **directive)


def test_a_bound_is_for_rows_alone() -> None:
    with pytest.raises(DirectiveError, match=r"bound and overflow are for dropless mixtures"):
        piper.compile(job("2"), Strategy(Mesh(tp=2), [piper.shard(where(), bound=2.0)]))


def test_experts_that_devices_cannot_share_are_refused() -> None:
    with pytest.raises(DirectiveError, match=r"8 experts cannot be shared equally by 3 devices"):
        compiled("2", Mesh(ep=3))


def test_a_replaced_loop_over_experts_is_shared() -> None:
    work = replace(expert_loops.job(expert_loops.tagged), global_batch=4)
    made = piper.compile(work, Strategy(Mesh(ep=2), [shared(bound=1.0), *recipes.data_parallel(over=("ep",))]))
    found = run(made)
    parity.assert_parity(found, parity.reference(work, replicas=2, microbatches=1, steps=2))
    assert not lies(made.plan, found.memory)
