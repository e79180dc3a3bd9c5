"""Steps that devices share, in predictions: their messages take time and links, their ranks keep in step, and all is
shown."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

import piper
from piper import Mesh, Strategy, models, recipes
from piper.api.captures.capturing import captured_job, program_at, rewritten
from piper.api.problems.tuning_problem import Conditions, problem_of
from piper.cli import app
from piper.views.explained.exchanges import exchanges
from piper_autotune.scoring.evaluators import Here
from piper_autotune.scoring.scoring import Scored
from piper_autotune.space.problem import Programs, wanted_by
from piper_autotune.space.rules import PruningRules
from piper_autotune.space.sketch import Sketches
from piper_compiler import directive, site_field
from piper_compiler.durations import LINK, InstructionSeconds, chunk_seconds, nominal
from piper_ir.fold.memory import peak
from piper_ir.graph.graph import Graph
from piper_ir.ground.errors import CompileError
from piper_ir.plan.plan import COMPUTE, Plan
from piper_ir.program.costs import Duration
from piper_ir.program.ops import Compute
from piper_report import prediction_table
from piper_report.pages.chrome import chrome_trace
from piper_runtime import Job
from piper_runtime.launch.processes.processes import Pool
from piper_simulator import Cluster, DeviceModel, load_cluster, simulate, whole_work
from piper_simulator.contention import loads
from piper_simulator.durations.communication import duration, rank_group
from piper_simulator.durations.instances import axes_inside, instances
from piper_simulator.durations.kernels import step_seconds
from piper_simulator.metrics import executed_flops, model_flops, repeated_share
from piper_simulator.times.splitting import each_rank, split
from tests.helpers.cases import each_case
from tests.helpers.slow_devices import slow_devices

H100 = load_cluster("h100x8")
SIZES = models.LlamaConfig(layers=2, width=64, heads=4, kv_heads=2, hidden=96, vocab=64, length=16)


@cache
def job(rows: int = 8) -> Job:
    return models.job(SIZES, global_batch=rows, precision="float32")


@cache
def plan(sequence: bool = False, pp: int = 1, dp: int = 1, tp: int = 2) -> Plan:
    directives = [*(recipes.tensor_parallel(sequence=sequence) if tp > 1 else ())]
    directives += recipes.one_f_one_b(pp=pp, microbatches=2) if pp > 1 else ()
    directives += recipes.data_parallel(bucket_mb=0.01) if dp > 1 else ()
    return piper.compile(job(), Strategy(Mesh(tp=tp, pp=pp, dp=dp), directives)).plan


@cache
def dropless(capacity: float | None = None) -> Plan:
    """Return a plan of two devices that share experts: one without a capacity exchanges inside of steps."""
    sizes = models.MoEConfig(
        layers=1,
        width=64,
        heads=4,
        kv_heads=2,
        hidden=96,
        vocab=64,
        length=16,
        experts=4,
        top_k=2,
        capacity_factor=capacity,
    )
    recipe = [*recipes.expert_parallel(), *recipes.data_parallel(over=("dp", "ep"))]
    return piper.compile(
        models.job(sizes, global_batch=8, precision="float32"), Strategy(Mesh(ep=2, dp=2), recipe)
    ).plan


def expected(
    of: Plan, cluster: Cluster, members: tuple[int, ...]
) -> dict[str, tuple[float, float]]:
    """By instruction of the compute stream the seconds of its kernels and of its messages, from chunks and cluster
    alone."""
    out = {}
    for _, _, instr in of.instructions():
        if instr.stream != COMPUTE:
            continue
        steps = [
            (p.op.step, of.chunk(p.op.variant).steps[p.op.step])
            for p in instr.parts
            if isinstance(p.op, Compute)
        ]
        kernels = sum(step_seconds(cluster.device, sig.cost, step) for step, sig in steps)
        group = rank_group(cluster, members)
        each = [(c.kind, int(c.nbytes)) for _, sig in steps for c in sig.collectives]
        sent = sum(
            duration(cluster, kind, nbytes, group).seconds for kind, nbytes in each if nbytes
        )
        out[instr.name] = kernels, sent
    return out


@pytest.mark.parametrize("sequence", [False, True])
def test_a_step_takes_its_kernels_and_then_its_messages(sequence: bool) -> None:
    of = plan(sequence)
    (role,) = of.roles
    model = DeviceModel(of, H100, None)
    wanted = expected(of, H100, (0, 1))
    both = 0
    for instr in (i for i in role.program if i.stream == COMPUTE):
        work, (kernels, sent) = model.work(role, instr), wanted[instr.name]
        assert work.inside_s == pytest.approx(sent)
        assert work.seconds >= kernels + sent - 1e-12
        whole = replace(of, shared=())  # the same without messages
        alone = DeviceModel(whole, H100, None).work(role, instr)
        assert work.seconds - alone.seconds == pytest.approx(sent)
        both += bool(sent and kernels)
    assert both >= 2, "forward and backward have both"


def test_the_compiler_orders_by_steps_with_their_messages() -> None:
    of = plan(sequence=True)
    seconds = InstructionSeconds(of.chunks)
    chunk = next(c for c in of.chunks if c.coords.get("layer") == 1)
    for step, sig in chunk.steps.items():
        sent = sum(int(c.nbytes) for c in sig.collectives) / LINK
        assert sent > 0
        assert (
            seconds.step(chunk.id, step)
            == pytest.approx(nominal(sig.cost) + sent)
            == chunk_seconds(chunk, step)
        )


def test_an_overlap_hides_no_message_inside_of_a_step() -> None:
    """A step waits for its messages; what another member of a group computes comes before or after."""
    first, both, last = (
        piper.where(phase="F", mb=0),
        (piper.where(phase="F", mb=1), piper.where(phase="B", mb=0)),
        piper.where(phase="B", mb=1),
    )
    for group in (piper.overlap(*both), both[0]):
        orders = [piper.order(first, group, *(both[1:] if group is both[0] else ()), last)]
        directives = [
            *recipes.tensor_parallel(),
            piper.split(piper.where(), microbatches=2),
            *orders,
        ]
        of = piper.compile(job(), Strategy(Mesh(tp=2), directives)).plan
        (role,) = of.roles
        works = [
            DeviceModel(of, H100, None).work(role, i) for i in role.program if i.stream == COMPUTE
        ]
        assert sum(w.inside_s for w in works) > 0
        assert simulate(of, H100).step_s >= sum(w.seconds for w in works)


def test_where_the_ranks_are_decides_on_the_time_of_their_messages() -> None:
    near, far = plan(), load_cluster("h100x8")
    far = replace(far, per_node=1, nodes=((8, far.device),))
    inside = [simulate(near, on).inside_comm_s for on in (H100, far)]
    assert inside[1] > 2 * inside[0] > 0


def test_ranks_that_share_chunks_are_one_unit_as_slow_as_the_slowest() -> None:
    of, slow = plan(dp=2), replace(H100, slow_ranks={1: 3.0})
    parts = split(of, slow, shared=True).plan
    assert [role.ranks for role in parts.roles] == [(0, 1), (2, 3)]
    model = DeviceModel(parts, slow, None)
    instr = next(i for i in parts.roles[0].program if i.stream == COMPUTE)
    first, second = (model.work(role, instr) for role in parts.roles)
    assert first.inside_s == second.inside_s > 0
    assert first.seconds - first.inside_s == pytest.approx(3 * (second.seconds - second.inside_s))
    assert [role.ranks for role in each_rank(of).plan.roles] == [(0, 1), (2, 3)]
    assert split(of, H100, shared=True).plan is of


@pytest.mark.long
def test_dropless_experts_exchange_inside_of_steps_and_keep_in_step() -> None:
    """Further rounds, which a plan has without bytes, take no time; experts with a capacity meet between steps."""
    of, slow = dropless(), replace(H100, slow_ranks={1: 3.0})
    (role,) = of.roles
    members = next(
        ranks
        for c in of.channels
        if c.purpose == "tensor"
        for ranks in instances(of, c)
        if 0 in ranks
    )
    wanted, model = expected(of, H100, members), DeviceModel(of, H100, None)
    found = {i.name: model.work(role, i).inside_s for i in role.program if i.stream == COMPUTE}
    assert found == {name: pytest.approx(sent) for name, (_, sent) in wanted.items()}
    assert (
        simulate(of, H100).inside_comm_s == pytest.approx(sum(found.values()))
        and sum(found.values()) > 0
    )
    pairs = sorted(instances(of, next(c for c in of.channels if c.purpose == "tensor")))
    assert sorted(r.ranks for r in split(of, slow, shared=False).plan.roles) == pairs
    told = exchanges(of)
    assert (
        told.startswith("dropless experts: what devices along ep=2 exchange inside of steps")
        and "FLOPs" not in told
    )
    assert (
        "F: 1 all_gather of 64 B, 2 all_to_all of 40 KiB\n" in told
        and "I: 2 all_to_all of 40 KiB\n" in told
    )
    between = dropless(capacity=1.0)
    assert simulate(between, H100).inside_comm_s == 0.0 and exchanges(between) == ""
    assert (
        axes_inside(of) == ("ep",)
        and axes_inside(between) == () == axes_inside(plan(tp=1))
        and axes_inside(plan()) == ("tp",)
    )


def test_messages_inside_of_steps_share_links_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """With data parallelism, whose reductions pass through the same ports as the backward's messages."""
    of = plan(sequence=True, dp=2)
    on = slow_devices("h100x8")
    assert simulate(of, on, contention=False).step_s < (with_them := simulate(of, on)).step_s
    whole = loads.all_loads
    monkeypatch.setattr(
        "piper_simulator.times.timed.all_loads", lambda *a: loads.SharedFlows(whole(*a).messages)
    )
    assert simulate(of, on).step_s < with_them.step_s, (
        "as compute they would take nothing from the reductions"
    )


def test_throughput_counts_the_rows_of_replicas_and_flops_those_of_all_devices() -> None:
    one, two = plan(tp=1), plan()
    assert two.tokens_per_step == one.tokens_per_step
    found = simulate(two, H100)
    assert found.tokens_per_s == pytest.approx(8 * 16 / found.period_s)
    assert model_flops(two, 16) == model_flops(one, 16)
    assert executed_flops(two) > executed_flops(one), "norms are computed by both"
    extra = 1 - executed_flops(one) / executed_flops(two)
    assert 0 < repeated_share(two) < extra, "there are ops besides that one device does not need"
    kernels = [k for c in two.chunks for sig in c.steps.values() for k in sig.cost.kernels]
    assert {k.shared for k in kernels if k.kind == "attention"} == {2}
    assert {k.shared for k in kernels if k.op == "rms_norm"} == {1}
    assert repeated_share(one) == 0.0


@each_case(
    ("axes", "sequence"),
    [({"tp": 2}, False), ({"cp": 2, "tp": 2}, True)],
)
def test_utilisation_by_hand(axes: dict[str, int], sequence: bool) -> None:
    """6 N + 12 L h s per token of the whole model, over what all devices can do in the time of a step."""
    sharers = [*(recipes.tensor_parallel(sequence=sequence) if "tp" in axes else ())]
    sharers += recipes.context_parallel() if "cp" in axes else ()
    of = piper.compile(job(), Strategy(Mesh(**axes), sharers)).plan
    width, head, c = SIZES.width, SIZES.width // SIZES.heads, SIZES
    layer = 2 * width * width + 2 * width * c.kv_heads * head + 3 * width * c.hidden + 2 * width
    n = 2 * c.vocab * width + c.layers * layer + width
    flops = (6 * n + 12 * c.layers * width * c.length) * 8 * c.length
    found = simulate(of, H100)
    assert model_flops(of, c.length) == flops
    assert found.mfu == pytest.approx(
        flops / found.period_s / of.mesh.world / H100.device.peak_flops["float32"]
    )


def test_time_and_bytes_inside_of_steps_are_shown() -> None:
    of = plan(pp=2)
    found = simulate(of, H100)
    spans = [s for s in found.trace.spans if s.rank == 0 and s.stream == COMPUTE]
    sent = sum(s.bytes for s in spans)
    role = of.roles[0]
    counted = [
        int(c.nbytes)
        for instr in role.program
        for p in instr.parts
        if isinstance(p.op, Compute)
        for c in of.chunk(p.op.variant).steps[p.op.step].collectives
    ]
    assert sent == sum(counted) > 0
    assert found.inside_comm_s == pytest.approx(
        max(sum(s.inside_s for s in found.trace.spans if s.rank == r) for r in range(4))
    )
    assert found.summary()["inside_comm_s"] == found.inside_comm_s
    assert simulate(plan(tp=1), H100).inside_comm_s == 0.0


@pytest.mark.parametrize("pp", [1, 2])
def test_memory_is_that_of_the_plan_with_a_communicator_per_channel(pp: int) -> None:
    of = plan(sequence=True, pp=pp)
    found = simulate(of, H100)
    counted = replace(of, device="cuda")
    for rank in range(of.mesh.world):
        lines = found.memory(rank)
        groups = [
            c
            for c in of.channels
            if c.kind == "group" and of.role_of(rank).role in c.roles and len(of.peers(c, rank)) > 1
        ]
        assert any(c.purpose == "tensor" for c in groups)
        assert lines["group_communicators"] == len(groups) * H100.device.group_bytes
    assert found.peak_bytes[0] == peak(counted, counted.role_of(0)).total


@directive
@dataclass(frozen=True)
class WithoutTorch:
    """Let nobody compile it who has torch, but this process."""

    home: int
    site: str = site_field()

    def check(self, graph: Graph) -> None:
        if os.getpid() != self.home and "torch" in sys.modules:
            raise CompileError("a worker has imported torch")

    def apply(self, graph: Graph) -> Graph:
        return graph


def space(trial: piper.Trial) -> Strategy:
    tp = trial.suggest_categorical("tp", [1, 2])
    sequence = trial.suggest_categorical("sequence", [False, True])
    pp = trial.suggest_categorical("pp", [1, 2])
    return Strategy(
        Mesh(tp=tp, pp=pp),
        [
            *recipes.tensor_parallel(sequence=sequence),
            *recipes.one_f_one_b(pp=pp, microbatches=2),
            WithoutTorch(os.getpid()),
        ],
    )


def test_the_tuner_searches_over_shared_chunks_in_workers_without_torch() -> None:
    study = piper.tune(job(), space, cluster="h100x8", trials=8, workers=1, memory_limit=None)
    assert {row.state for row in study.rows} == {"complete"}, [row.reason for row in study.rows]
    assert len({row.step_s for row in study.rows if row.params["tp"] == 2}) >= 4
    for strategy in study.strategies.values():
        made = piper.compile(job(), strategy)
        assert made.plan.shared == (("tp",) if strategy.mesh.size("tp") > 1 else ())


def test_bounds_of_shared_chunks_hold() -> None:
    """The rules reject by what a device of those that share holds and computes: never more than the plan does."""
    problem, more = problem_of(job(), Conditions(H100))
    programs = Programs(problem, more["at_rows"], more["under"])
    sketches = Sketches(problem, programs)
    for sequence in (False, True):
        strategy = Strategy(
            Mesh(tp=2),
            [
                *recipes.tensor_parallel(sequence=sequence),
                *recipes.one_f_one_b(pp=1, microbatches=2),
            ],
        )
        sketch = sketches.sketch(strategy)
        assert (
            sketch is not None
            and sketch.wanted == wanted_by(strategy, problem)
            and sketch.wanted.request.shardings
        )
        rows = sketches.rows(sketch)
        assert rows == 4
        made = piper.compile(job(), strategy).plan
        ((held, _),) = sketches.filled_bytes(sketch, rows).values()
        assert 0.5 * made.roles[0].peak_bytes < held <= made.roles[0].peak_bytes
        least, cause = sketches.computing_s(strategy, sketch, rows)
        found = simulate(made, H100, contention=False)
        assert found.inside_comm_s < least <= found.period_s
        assert cause == "busiest host launches kernels" and least > 0.9 * found.period_s


def test_candidates_of_one_row_need_no_program_at_any_rows() -> None:
    """A program at one row is the same from traces there alone, and so is the score."""
    problem, more = problem_of(job(), Conditions(H100))
    programs = Programs(problem, more["at_rows"], more["under"])
    kept = [piper.recompute(piper.where(), keep="inputs")]
    strategy = Strategy(
        Mesh(tp=2),
        [*recipes.tensor_parallel(), *recipes.one_f_one_b(pp=1, microbatches=8), *kept],
    )
    wanted, captured = wanted_by(strategy, problem), captured_job(job())
    fresh = replace(captured, shared={}, under={})
    alone = program_at(rewritten(fresh, wanted.request, 1), 1)
    assert alone == program_at(rewritten(captured, wanted.request), 1)
    assert PruningRules(problem, programs).check(strategy, known_s=1e9) is None
    here = Here(problem, programs)
    found = here.result(here.submit(strategy))
    assert set(programs.found) == {replace(wanted, rows=1)}
    simulated = simulate(piper.compile(job(), strategy).plan, H100, contention=False)
    assert isinstance(found, Scored) and found.period_s == simulated.period_s


def test_explain_and_simulate_say_what_is_exchanged_inside_of_steps(tmp_path: Path) -> None:
    path = tmp_path / "strategy.py"
    path.write_text(FILE)
    told = CliRunner().invoke(app, ["explain", str(path)])
    assert told.exit_code == 0, told.output
    assert "shared chunks: what devices along tp=2 exchange inside of steps" in told.stdout
    assert re.search(r"pp0 +F: \d+ all_reduce of .*", told.stdout) and "tp.pp0" in told.stdout
    assert re.search(r"[0-9]\.[1-9]% of the FLOPs repeat", told.stdout)
    told = CliRunner().invoke(app, ["simulate", str(path), "--cluster", "h100x8"])
    assert told.exit_code == 0, told.output
    assert re.search(r"communication in steps +[\d.]+ [um]s", told.stdout), told.stdout
    of = plan(pp=2)
    spans = [
        e
        for e in chrome_trace(simulate(of, H100).trace)["traceEvents"]
        if e["ph"] == "X" and "F" in e["name"]
    ]
    assert any(e["args"].get("inside_us", 0) > 0 and e["args"]["bytes"] > 0 for e in spans)


FILE = """
import piper
from piper import models, recipes

sizes = models.LlamaConfig(layers=2, width=64, heads=4, kv_heads=2, hidden=96, vocab=64, length=16)
job = models.job(sizes, global_batch=8, precision="float32")
recipe = (*recipes.tensor_parallel(), *recipes.one_f_one_b(pp=2, microbatches=2))
strategy = piper.Strategy(piper.Mesh(tp=2, pp=2), recipe)
"""


@pytest.mark.long
def test_a_profile_has_the_kernels_of_shared_chunks_and_their_messages_apart(pool: Pool) -> None:
    strategy = Strategy(Mesh(tp=2), recipes.tensor_parallel(sequence=True))
    costs = piper.profile(job(), strategy, rows=[8], repeats=1, pool=pool)
    of = piper.compile(job(), strategy).plan
    assert {(s.code, s.step) for s in costs.steps} >= {
        (c.code, s) for c in of.chunks for s, g in c.steps.items() if not g.empty
    }
    found = simulate(of, "cpu-local", costs=costs)
    assert found.summary()["sources"].get("formula", 0.0) < 0.05, found.notes
    assert not any("no cost" in note or "not in the costs" in note for note in found.notes)
    sent = {
        (c.kind, int(c.nbytes))
        for chunk in of.chunks
        for sig in chunk.steps.values()
        for c in sig.collectives
    }
    assert {kind for kind, _ in sent} == {"all_gather", "reduce_scatter"}
    assert all(costs.of_comm(kind, nbytes, 2) is not None for kind, nbytes in sent)
    dearer = replace(
        costs,
        comm=tuple(replace(c, duration=Duration(c.duration.seconds + 1.0)) for c in costs.comm),
    )
    count = sum(len(sig.collectives) for chunk in of.chunks for sig in chunk.steps.values())
    assert simulate(of, "cpu-local", costs=dearer).inside_comm_s == pytest.approx(
        found.inside_comm_s + count
    )


@cache
def of_a_vocabulary(vocab: int, sequence: bool = False) -> Plan:
    sizes = models.LlamaConfig(
        layers=1, width=512, heads=4, kv_heads=2, hidden=1024, vocab=vocab, length=1024
    )
    whole = models.job(sizes, global_batch=4, precision="float32")
    return piper.compile(
        whole, Strategy(Mesh(tp=2), recipes.tensor_parallel(sequence=sequence))
    ).plan


def left_whole(of: Plan) -> list[str]:
    return [note for note in simulate(of, "h100x8").notes if "leaves operators whole" in note]


@pytest.mark.long
def test_what_is_left_whole_and_costs_much_is_said() -> None:
    """A vocabulary that two devices cannot share leaves the products of the head whole."""
    assert left_whole(of_a_vocabulary(16_001, sequence=True)) == [], "then they share its tokens"
    even, uneven = (simulate(of_a_vocabulary(vocab), "h100x8") for vocab in (16_000, 16_001))
    (note,) = left_whole(of_a_vocabulary(16_001))
    saved = re.search(
        r"each of the devices along tp=2 computes: .* ([\d.]+) ms of the step .*: mm \(([\d.]+)%",
        note,
    )
    assert saved and float(saved[1]) * 1e-3 == pytest.approx(
        uneven.step_s - even.step_s, rel=0.3
    ), "what sharing saves"
    assert float(saved[2]) > 10 and not any(
        " mm (" in other for other in left_whole(of_a_vocabulary(16_000))
    )
    assert (
        note in uneven.summary()["notes"]
        and f"warning: {note}" in prediction_table(uneven, title="").notes
    )


def test_a_large_tensor_that_is_left_whole_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_work, "MOST_SHARE", 1.0)
    of = of_a_vocabulary(16_001)
    assert left_whole(of) == []
    monkeypatch.setattr(whole_work, "MOST_MEMORY", 2**28 / 2**36)  # of 80 GiB
    (note,) = left_whole(of)
    assert re.search(r"cross_entropy\w* \([\d.]+%, [\d.]+ MiB read and written at once\)", note)
    assert " add (" not in note, "what is small is not named"
