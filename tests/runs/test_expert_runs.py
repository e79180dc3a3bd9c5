"""What stands around training with shared experts: saved states, bits, simulated, emulated and measured times,
tables."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import piper
from benchmarks import exchanges
from piper import Mesh, Strategy, recipes, where
from piper.api.reference.verification import verify_strategy
from piper.api.running.emulation import emulate
from piper.views.explained.explain import explain
from piper_compiler import durations
from piper_compiler.passes.order import schedule
from piper_ir.graph.graph import Graph
from piper_ir.ground.codec import dumps, loads
from piper_ir.plan.plan import Plan
from piper_ir.plan.text import format_plan
from piper_ir.program.costs import Costs
from piper_runtime import Checkpoints
from piper_runtime.launch.processes.processes import Pool
from piper_simulator import load_cluster, simulate
from piper_simulator.durations.communication import duration, rank_group
from piper_simulator.metrics import executed_flops, model_flops, repeated_share
from tests.helpers import parity, shared_jobs
from tests.parity.test_expert_parallel import compiled, rows

H100 = load_cluster("h100x8")
LENGTH = shared_jobs.SIZES["experts"].length


@cache
def pair(ep: int) -> Any:
    """A mixture on two devices that share experts, or do not."""
    return piper.compile(
        shared_jobs.job("experts"),
        Strategy(Mesh(ep=ep, dp=2 // ep), [recipes.expert_parallel(), rows()]),
    )


def test_gradients_of_experts_are_those_of_one_device_to_the_bit() -> None:
    """Rows come in the order of one device. Other gradients are sums over devices, and so differ in the last bits."""
    job = replace(shared_jobs.job("experts"), clip_norm=None)
    runs = [
        piper.execute(
            piper.compile(job, Strategy(mesh, directives)),
            steps=1,
            launcher="inline",
            gradients=True,
        )
        for mesh, directives in ((Mesh(), []), (Mesh(ep=4), [recipes.expert_parallel(), rows()]))
    ]
    one, four = (run.gradients[0] for run in runs)
    same = {name for name in one if torch.equal(one[name], four[name])}
    assert same >= {name for name in one if name.endswith((".gate", ".up", ".down"))}
    assert same < set(one)


def rows_together(step: int, wanted: range) -> Any:
    """The batch in which one row of each of two replicas of 4 rows make up a microbatch of one device."""
    inputs, targets = shared_jobs.job("experts").batch(step, range(8))
    chosen = [n // 2 + 4 * (n % 2) for n in wanted]
    return inputs[chosen], targets[chosen]


BITS = {
    "1f1b": (Mesh(ep=2, pp=2), recipes.one_f_one_b(pp=2, microbatches=4)),
    "zbv": (Mesh(ep=2, pp=2), recipes.zbv(pp=2, microbatches=4)),
    "dualpipe_v": (Mesh(ep=2, pp=2), recipes.dualpipe_v(pp=2, microbatches=4)),
    "recompute": (
        Mesh(ep=2),
        (piper.split(where(), microbatches=4), piper.recompute(where(), keep="inputs")),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.long] * (case != "zbv")) for case in BITS]
)
def test_gradients_of_experts_are_those_of_one_device_to_the_bit_under_a_schedule(
    case: str,
) -> None:
    """Microbatches have the same rows on one device, which adds them up in the same order."""
    mesh, directives = BITS[case]
    job = replace(shared_jobs.job("experts"), clip_norm=None)
    two = piper.compile(job, Strategy(mesh, [recipes.expert_parallel(), *directives, rows()]))
    one = piper.compile(job, Strategy(Mesh(), [piper.split(where(), microbatches=4)]))
    found, alone, otherwise = (
        piper.execute(made, steps=1, launcher="inline", gradients=True).gradients[0]
        for made in (two, replace(one, job=replace(job, batch=rows_together)), one)
    )
    experts = {name for name in alone if name.endswith((".gate", ".up", ".down"))}
    assert len(experts) == 12 and all(torch.equal(found[name], alone[name]) for name in experts)
    assert not all(torch.equal(found[name], otherwise[name]) for name in experts), (
        "other rows together differ in bits"
    )


def test_a_checkpoint_is_of_whole_experts(tmp_path: Path) -> None:
    saved = compiled(Mesh(ep=2, dp=2), [rows(zero=1)])
    shared_jobs.run(saved, steps=2, checkpoint=Checkpoints(tmp_path, every=2))
    alone = piper.compile(shared_jobs.job("experts"), Strategy(Mesh(), []))
    for made in (saved, compiled(Mesh(ep=4), [rows(zero=3)]), alone):
        found = shared_jobs.run(made, steps=1, resume=tmp_path / "step-00000002")
        whole = shared_jobs.expected("experts", made.plan.replicas, 1)
        parity.assert_parity(
            found, replace(whole, losses=whole.losses[2:], gradients=whole.gradients[2:])
        )


def test_seeded_weights_are_those_of_one_device() -> None:
    job = replace(shared_jobs.job("experts"), init="seeded", seed=5)
    strategy = Strategy(Mesh(ep=2), [*recipes.expert_parallel(), *rows()])
    assert verify_strategy(job, strategy).equal


def test_plans_and_graphs_are_written_and_read() -> None:
    made = compiled(Mesh(ep=2, pp=2), [recipes.one_f_one_b(pp=2, microbatches=2), rows()])
    text = format_plan(made.plan)
    assert "AllToAll" in text and made.plan.key == loads(Plan, dumps(made.plan)).key
    assert loads(Graph, dumps(made.graph)).exchanges == made.graph.exchanges


def test_explain_says_what_is_exchanged() -> None:
    said = explain(compiled(Mesh(ep=2), [rows()]))
    assert "ep.all.ep                group all over ep: tokens to experts and back" in said
    assert "experts 4  shared by 2 (ep); gate, up, down :0" in said
    assert (
        "tokens of 2 devices along ep come and go by AllToAll: 10 KiB in, 10 KiB out, and gradients"
        in said
    )


def test_each_device_computes_as_much_as_without() -> None:
    """Half of the experts for twice the rows; and so it is in utilisations, where a token visits as many experts."""
    shared, alone = pair(2).plan, pair(1).plan
    assert executed_flops(shared) == pytest.approx(executed_flops(alone), rel=0.01)
    assert model_flops(shared, LENGTH) == model_flops(alone, LENGTH)
    assert repeated_share(shared) == 0.0


def test_an_exchange_takes_as_long_as_an_all_to_all_of_its_bytes() -> None:
    plan = pair(2).plan
    trace = simulate(plan, H100, contention=False).trace
    role = plan.roles[0]
    spans = [s for s in trace.spans if s.rank == 0 and s.stream == "ep"]
    nbytes = plan.values[role.program[spans[0].instr].parts[0].reads[0]].nbytes
    expected = duration(H100, "all_to_all", nbytes, rank_group(H100, (0, 1))).seconds
    assert len(spans) == 4 * shared_jobs.SIZES["experts"].layers
    assert [s.end - s.start for s in spans] == pytest.approx([expected] * len(spans))


NEAR, FAR = 1.9e-6 + 3 / 4 * 5120 / 370e9, 4e-6 + 2 / 4 * 5120 / 48.5e9
"""Of four parts three go to devices of the same node; or, of two nodes, two to the other one."""


@pytest.mark.parametrize(("cluster", "seconds"), [("h100x4", NEAR), ("h100x2*2", FAR)])
def test_an_exchange_by_hand(cluster: str, seconds: float) -> None:
    """Two rows, five places of each of four experts, width 16, float64."""
    plan = compiled(Mesh(ep=4), [rows()]).plan
    spans = [s for s in simulate(plan, load_cluster(cluster)).trace.spans if s.stream == "ep"]
    program = plan.roles[0].program
    assert {plan.values[program[s.instr].parts[0].reads[0]].nbytes for s in spans} == {
        2 * 5 * 4 * 16 * 8
    }
    assert [s.end - s.start for s in spans] == pytest.approx([seconds] * len(spans))
    assert len(spans) == 4 * 4 * shared_jobs.SIZES["experts"].layers


@pytest.mark.long
def test_emulated_as_simulated(pool: Pool) -> None:
    simulated = simulate(pair(2).plan, H100, contention=False).step_s
    found = [abs(emulate(pair(2), cluster=H100, pool=pool).step_s[0] / simulated - 1)]
    while found[-1] > 0.04 and len(found) < 3:
        found.append(abs(emulate(pair(2), cluster=H100, pool=pool).step_s[0] / simulated - 1))
    assert found[-1] <= 0.04, found


EXCHANGE = 1e-3
"""Seconds of an exchange of the small mixture here, in the compiler as in a run."""


def scheduled(
    name: str, microbatches: int, experts: float = 1.0, orders: str = "five"
) -> tuple[piper.Compiled, Costs]:
    """The mixture on two stages of two devices, where computing takes a multiple of an exchange."""
    work = replace(shared_jobs.job("experts"), global_batch=2 * microbatches)
    directives = exchanges.SCHEDULES[name](pp=2, microbatches=microbatches)
    with pytest.MonkeyPatch.context() as patch:
        for module in (durations, schedule):
            patch.setattr(module, "LINK", 2560 / EXCHANGE)
        costs = exchanges.durations(exchanges.compiled(work, directives).plan, experts)
        with {"four": exchanges.four_orders, "earliest": exchanges.earliest}.get(
            orders, nullcontext
        )():
            return exchanges.compiled(work, directives, costs=costs), costs


PAIRS = "1F1B, pairs overlapped"


def test_in_turn_all_exchanges_are_exposed_and_in_pairs_hardly_one_is() -> None:
    serial, *pairs = (exchanges.simulated(*scheduled(name, 8)) for name in exchanges.SCHEDULES)
    assert serial.whole == pytest.approx(1.0, abs=1e-3) and serial.paired is None
    for found in pairs:
        assert found.paired is not None and found.paired < 0.02 and found.step < 0.75 * serial.step
    assert exchanges.simulated(*scheduled(PAIRS, 24)).whole < 0.1, (
        "what begins and ends a step matters less in a longer one"
    )


def test_negative_control_orders_that_do_not_look_at_messages_expose_them() -> None:
    hidden, exposed = (
        exchanges.simulated(*scheduled(PAIRS, 8, orders=orders)) for orders in ("five", "four")
    )
    assert hidden.paired is not None and exposed.paired is not None
    assert hidden.paired < 1e-9 and exposed.paired > 0.1
    assert exposed.step > hidden.step + 1.9, "two exchanges"


@pytest.mark.parametrize("microbatches", [4, pytest.param(6, marks=pytest.mark.long)])
def test_a_short_step_hides_its_messages_although_it_ends_as_early_without(
    microbatches: int,
) -> None:
    """Another device decides when so short a step ends; the earliest of equals would leave messages exposed."""
    hidden, exposed = (
        exchanges.simulated(*scheduled(PAIRS, microbatches, orders=o)) for o in ("five", "earliest")
    )
    assert hidden.step == pytest.approx(exposed.step)
    assert hidden.paired is not None and exposed.paired is not None
    assert hidden.paired < 1e-9 and exposed.paired > 0.1 and hidden.whole < exposed.whole


def test_what_computation_cannot_cover_is_exposed() -> None:
    """Experts take less than a third of the exchange beside them."""
    five, four = (
        exchanges.simulated(*scheduled(PAIRS, 8, experts=0.3, orders=orders))
        for orders in ("five", "four")
    )
    assert five.paired is not None and four.paired is not None
    assert 0.2 < five.paired < four.paired - 0.05 and five.step < four.step


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "microbatches"),
    [("1F1B", 2), ("DualPipeV", 4), pytest.param(PAIRS, 8, marks=pytest.mark.long)],
)
def test_what_is_hidden_in_a_simulation_is_hidden_in_a_run(
    name: str, microbatches: int, pool: Pool
) -> None:
    """Processes with streams and messages run it; the best of three attempts counts."""
    made, costs = scheduled(name, microbatches)
    simulated = exchanges.simulated(made, costs)
    for _ in range(3):
        found = exchanges.emulated(made, costs, pool)
        if abs(found.step / simulated.step - 1) <= 0.04 and (found.paired or 0.0) <= 0.1:
            break
    assert found.step == pytest.approx(simulated.step, rel=0.04)
    assert found.whole == pytest.approx(simulated.whole, abs=0.1)
    assert found.whole > 0.95 if found.paired is None else found.paired <= 0.1


def strategy(trial: Any) -> Strategy:
    ep = trial.suggest_categorical("ep", [1, 2, 4])
    return Strategy(Mesh(ep=ep, dp=4 // ep), [recipes.expert_parallel(), rows()])


def test_the_tuner_tries_degrees() -> None:
    study = piper.tune(shared_jobs.job("experts"), strategy, cluster="h100x4", trials=3, workers=1)
    assert {dict(row.params)["ep"] for row in study.rows} == {1, 2, 4}


@pytest.mark.long
def test_every_step_of_chunks_of_experts_is_measured() -> None:
    made = compiled(Mesh(ep=2), [rows()])
    costs = piper.profile(made.job, made.strategy, repeats=2)
    found = {(s.code, s.step) for s in costs.steps}
    assert {
        (c.code, step) for c in made.plan.chunks for step, sig in c.steps.items() if not sig.empty
    } <= found
    assert any(m.op == "all_to_all" for m in costs.comm)
