"""Time truth: what is simulated is what runs. Plans on real processes, streams and rendezvous, with sleeps for compute.

The one place where a test asserts a time, in the best of three attempts, since other processes share the machine. The
order on the streams must hold in all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import piper
from piper.api.running.emulation import emulate
from piper.cli import app
from piper_ir.ground.errors import ClusterError, ExecutionError, JobError
from piper_ir.ground.trace import Trace
from piper_ir.plan.plan import COMPUTE, Plan
from piper_ir.program.costs import CommDuration, Costs, Duration, StepDuration
from piper_ir.program.ops import Recv
from piper_runtime import Run
from piper_runtime.launch.processes.emulation import emulate as run
from piper_runtime.launch.processes.processes import Pool
from piper_simulator import Cluster
from tests.helpers.plan_edits import inserted, with_program, without

TOLERANCE = 0.04
ATTEMPTS = 3
F, I, W = 0.03, 0.02, 0.025  # noqa: E741 - the field's name for the input gradient
"""Seconds of a stage and microbatch: no instruction of compute sleeps less than 20 ms."""
HOP, TRANSFER, REDUCTION = 0.004, 0.003, 0.03
OVERLAP = 0.05
"""Of a forward and a backward together, two thirds of their sum."""


@pytest.fixture(scope="module")
def eight() -> Iterator[Pool]:
    with Pool(8) as pool:
        yield pool


def directives(schedule: str, pp: int, dp: int, microbatches: int = 6) -> tuple[Any, ...]:
    """A recipe for pipelines; with schedule "none" data-parallel replicas alone."""
    found: tuple[Any, ...] = (piper.split(piper.where(), microbatches=microbatches),)
    if schedule != "none":
        found = getattr(piper.recipes, schedule)(pp=pp, microbatches=microbatches)
    if dp > 1:
        found += piper.recipes.data_parallel(
            bucket_mb=1e-5
        )  # a bucket per stage, so that reductions overlap with backwards
    return found


def compiled(schedule: str, pp: int, dp: int, microbatches: int = 6) -> piper.Compiled:
    """A synthetic program under a recipe."""
    return synthetic(directives(schedule, pp, dp, microbatches), pp, dp)


def synthetic(strategy: tuple[Any, ...], pp: int, dp: int = 1) -> piper.Compiled:
    """A program with as many stages as the directives want."""
    stages = next((d.stages for d in strategy if isinstance(d, piper.partition)), max(pp, 2))
    program = piper.synthetic(stages=stages, F=F, I=I, W=W, overlap=OVERLAP, params=64, hop=HOP)
    return piper.compile(program, piper.Strategy(piper.Mesh(pp=pp, dp=dp), strategy))


def costs(plan: Plan) -> Costs:
    """Transfers and reductions that take time, although the program gives only compute."""
    reductions = {(bucket.numel, plan.replicas) for bucket in plan.buckets}
    return Costs(
        comm=(
            CommDuration("p2p", 0, 2, Duration(TRANSFER, "given")),
            *(
                CommDuration("all_reduce", nbytes, ranks, Duration(REDUCTION, "given"))
                for nbytes, ranks in sorted(reductions)
            ),
        )
    )


def starts(trace: Trace) -> dict[tuple[int, str], list[int]]:
    """Per rank and stream the instructions in the order in which they started."""
    out: dict[tuple[int, str], list[int]] = defaultdict(list)
    for span in sorted(trace.spans, key=lambda s: (s.start, s.instr)):
        out[span.rank, span.stream].append(span.instr)
    return out


def differences(
    case: piper.Compiled, pool: Pool, on: Cluster | None = None
) -> tuple[piper.Simulation, list[float]]:
    """The simulation, and the relative differences of the emulated makespans: the last one is the first within the
    tolerance, if any is."""
    simulated = piper.simulate(case.plan, on, costs=costs(case.plan))
    found: list[float] = []
    while len(found) < ATTEMPTS and not (found and abs(found[-1]) <= TOLERANCE):
        emulated = emulate(case, cluster=on, costs=costs(case.plan), trace=True, pool=pool)
        assert starts(emulated.trace) == starts(simulated.trace)
        found.append(emulated.step_s[0] / simulated.step_s - 1)
    return simulated, found


def check(schedule: str, pp: int, dp: int, pool: Pool) -> None:
    _, found = differences(compiled(schedule, pp, dp), pool)
    assert abs(found[-1]) <= TOLERANCE, found


@pytest.mark.parametrize(("schedule", "pp", "dp"), [("one_f_one_b", 4, 1), ("gpipe", 2, 2)])
def test_time_truth(schedule: str, pp: int, dp: int, pool: Pool) -> None:
    check(schedule, pp, dp, pool)


def test_time_truth_of_a_slow_rank(pool: Pool) -> None:
    """Rank 1 computes for twice as long: the other replica waits for it in the reduction, and not before."""
    case = compiled("one_f_one_b", 2, 2, microbatches=3)
    slow = replace(piper.load_cluster("h100x4"), slow_ranks={1: 2.0})
    simulated, found = differences(case, pool, slow)
    assert abs(found[-1]) <= TOLERANCE, found
    busy = [simulated.step_s - idle for idle in simulated.bubble_s]
    assert busy == pytest.approx([busy[0], 2 * busy[0], busy[2], busy[2]])
    assert (
        emulate(case, cluster=slow, costs=costs(case.plan), pool=pool).trace.plan_key
        == case.plan.key
    )


def test_time_truth_of_a_host_that_launches(pool: Pool) -> None:
    """Forwards take as long as their launches, the update hides all of its own; the host runs ahead over steps."""
    sizes = piper.models.LlamaConfig(
        layers=2, width=64, heads=4, kv_heads=2, hidden=96, vocab=64, length=16
    )
    job = piper.models.job(sizes, global_batch=4, precision="float32")
    case = piper.compile(
        job, piper.Strategy(piper.Mesh(pp=2), piper.recipes.one_f_one_b(pp=2, microbatches=4))
    )

    def host(launch_s: float, issue_s: float) -> Cluster:
        return piper.load_cluster("h100x2").each_device(
            lambda device: replace(
                device,
                launch_s=launch_s,
                host_issue_s=issue_s,
                memory_bandwidth=device.memory_bandwidth / 40,
            )
        )

    on = host(3e-7, 1e-6)
    simulated, at_once = (
        piper.simulate(case.plan, x, contention=False) for x in (on, host(0.0, 0.0))
    )
    assert simulated.step_s > 1.2 * at_once.step_s
    assert simulated.period_s < simulated.step_s / (1 + 2 * TOLERANCE)
    found: list[tuple[float, float]] = []
    while len(found) < ATTEMPTS and not (found and max(map(abs, found[-1])) <= TOLERANCE):
        emulated = emulate(case, steps=4, cluster=on, trace=True, pool=pool)
        assert starts(emulated.trace) == starts(simulated.trace)
        assert emulated.period_s is not None
        found.append(
            (emulated.step_s[0] / simulated.step_s - 1, emulated.period_s / simulated.period_s - 1)
        )
    assert max(map(abs, found[-1])) <= TOLERANCE, found


SCHEDULES = sorted(set(piper.recipes.RECIPES) - {"gpipe", "one_f_one_b"})
"""With several chunks on a device, split backwards, overlapped pairs and stages on two devices."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_time_truth_of_every_schedule(schedule: str, pool: Pool) -> None:
    check(schedule, 4, 1, pool)


@pytest.mark.long
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_time_truth_of_every_schedule_on_eight_ranks(schedule: str, eight: Pool) -> None:
    check(schedule, 8, 1, eight)


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["dualpipe_v"])
def test_without_its_overlaps_a_plan_is_slower_by_what_the_simulator_says(
    schedule: str, pool: Pool
) -> None:
    """The same orders, each pair written as two selections."""
    pairs = directives(schedule, 4, 1, microbatches=14)
    apart = tuple(replace(d, overlaps=()) if isinstance(d, piper.order) else d for d in pairs)
    with_pairs, without = synthetic(pairs, 4), synthetic(apart, 4)
    (quick, quick_found), (slow, slow_found) = (
        differences(case, pool) for case in (with_pairs, without)
    )
    gain = slow.step_s / quick.step_s - 1
    assert gain > 0.1, "pairs gain enough to be seen"
    seen = slow.step_s * (1 + slow_found[-1]) / (quick.step_s * (1 + quick_found[-1])) - 1
    assert seen == pytest.approx(gain, abs=0.05), (gain, seen)


MORE = [
    ("gpipe", 4, 1),
    ("pipeline", 4, 1),
    ("none", 1, 4),
    ("one_f_one_b", 2, 2),
    ("pipeline", 2, 2),
]
WIDE = [
    *(
        (schedule, pp, 8 // pp)
        for schedule in ("gpipe", "one_f_one_b", "pipeline")
        for pp in (8, 4, 2)
    ),
    ("none", 1, 8),
]


@pytest.mark.long
@pytest.mark.parametrize(("schedule", "pp", "dp"), MORE)
def test_time_truth_of_the_other_recipes(schedule: str, pp: int, dp: int, pool: Pool) -> None:
    check(schedule, pp, dp, pool)


@pytest.mark.long
@pytest.mark.parametrize(("schedule", "pp", "dp"), WIDE)
def test_time_truth_of_eight_ranks(schedule: str, pp: int, dp: int, eight: Pool) -> None:
    check(schedule, pp, dp, eight)


def posted_late(plan: Plan) -> Plan:
    """The last receive of the first stage, put right before the compute that reads it, behind all compute before
    that."""
    role = plan.roles[0]
    index = max(k for k, instr in enumerate(role.program) if isinstance(instr.parts[0].op, Recv))
    late = role.program[index]
    (value,) = late.parts[0].writes
    program = without(role, index)
    reader = next(
        k for k, instr in enumerate(program) if any(value in part.reads for part in instr.parts)
    )
    earlier = sum(instr.stream == COMPUTE for instr in program[:reader])
    n = sum(instr.stream == late.stream for instr in program[:reader]) + 1
    program = inserted(program, reader, replace(late, waits=((COMPUTE, earlier),)))
    reads = program[reader + 1]
    waits = (*(w for w in reads.waits if w[0] != late.stream), (late.stream, n))
    program[reader + 1] = replace(reads, waits=waits)
    return with_program(plan, role, program)


def test_negative_control_a_receive_posted_late_shows_in_both(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        f"{__name__}.TRANSFER", 2 * F
    )  # half of it hides behind compute, if it is posted in time
    case = compiled("gpipe", 2, 1, microbatches=2)
    on_time, good = differences(case, pool)
    late, found = differences(replace(case, plan=posted_late(case.plan)), pool)
    gap = late.step_s / on_time.step_s - 1
    assert gap > 2 * TOLERANCE, gap
    assert abs(good[-1]) <= TOLERANCE and abs(found[-1]) <= TOLERANCE, (good, found)
    assert (1 + found[-1]) * (1 + gap) - 1 > TOLERANCE, "hence the tolerance tells the two apart"


def test_execute_emulates_in_simulated_seconds(pool: Pool, tmp_path: Path) -> None:
    """A program whose seconds nobody wants to wait for."""
    program = piper.synthetic(stages=2, F=300.0, I=400.0, W=200.0)
    strategy = piper.Strategy(piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=2))
    found: Run = piper.execute(
        piper.compile(program, strategy),
        steps=4,
        launcher="emulated",
        cluster=None,
        trace=True,
        out=tmp_path,
        pool=pool,
    )
    assert found.losses == [] and found.peak_bytes == {} and len(found.step_s) == 4
    assert found.trace.kind == "executed" and found.trace.step == 3
    assert found.trace.notes["time_scale"] == f"{0.1 / 300:g}"
    assert found.period_s == found.step_s[3]
    assert sum(found.step_s) >= 4 * 3 * (300 + 600) * (1 - 1e-9), "sleeping never ends early"
    assert {p.name for p in (tmp_path / "emulated-001").iterdir()} >= {
        "measured.json",
        "spans-measured.json",
    }
    with pytest.raises(ExecutionError, match="no state_dict"):
        found.state_dict()


def test_what_cannot_be_emulated_is_refused() -> None:
    case = compiled("gpipe", 2, 1)
    for cluster, says in (
        ("z9000x8", "unknown cluster"),
        ("h100x1", "2 ranks; h100-80g-sxm:1 has 1"),
    ):
        with pytest.raises(ClusterError, match=says):
            piper.execute(case, steps=1, launcher="emulated", cluster=cluster)
    with pytest.raises(JobError, match="steps=0"):
        piper.execute(case, steps=0, launcher="emulated")
    with pytest.raises(JobError, match="nothing is trained, so there is nothing for log"):
        piper.execute(case, steps=1, launcher="emulated", log=("jsonl",))


RECIPE = """
import torch
import piper

class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

def batch(step, rows):
    x = torch.zeros(len(rows), 64)
    return x, x

def optimizer(named):
    return torch.optim.SGD([p for _, p in named], lr=0.1)

job = piper.Job(MLP, batch, torch.nn.functional.mse_loss, optimizer, global_batch=8, tokens_per_row=1)
strategy = piper.Strategy(piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=2))
"""


def test_the_command_prints_simulated_beside_emulated(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "piper.api.running.emulation.run",
        lambda plan, durations, options: run(plan, durations, replace(options, pool=pool)),
    )
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE)
    done = CliRunner().invoke(
        app, ["run", str(recipe), "--emulate", "h100x8", "--out", str(tmp_path / "runs")]
    )
    assert done.exit_code == 0, done.output
    row = next(line for line in done.stdout.splitlines() if line.startswith("makespan of a step"))
    assert row.endswith("%") and row.count("us") == 2
    assert {p.name for p in (tmp_path / "runs" / "recipe-001").iterdir()} >= {
        "spans-predicted.json",
        "spans-measured.json",
    }


def shared_over_tp(pp: int) -> piper.Compiled:
    """A captured model whose chunks two devices share, in a pipeline."""
    sizes = piper.models.LlamaConfig(
        layers=2, width=64, heads=4, kv_heads=2, hidden=96, vocab=64, length=16
    )
    job = piper.models.job(sizes, global_batch=4, precision="float32")
    recipe = (
        *piper.recipes.tensor_parallel(sequence=True),
        *piper.recipes.one_f_one_b(pp=pp, microbatches=2),
    )
    return piper.compile(job, piper.Strategy(piper.Mesh(tp=2, pp=pp), recipe))


def measured(plan: Plan, inside: float) -> Costs:
    """As if somebody had measured: kernels take 20 to 30 ms, what is exchanged inside of a step `inside` for each
    message."""
    steps = {(c.cost_code(s), s): sig for c in plan.chunks for s, sig in c.steps.items()}
    taken = [
        StepDuration(code, s, plan.rows, Duration({"F": F, "I": I, "W": W}[s], "given"))
        for code, s in steps
    ]
    sent = {(c.kind, int(c.nbytes)) for sig in steps.values() for c in sig.collectives}
    comm = [
        CommDuration(kind, nbytes, 2, Duration(inside, "given")) for kind, nbytes in sorted(sent)
    ]
    return Costs(
        steps=tuple(taken), comm=(*comm, CommDuration("p2p", 0, 2, Duration(TRANSFER, "given")))
    )


@pytest.mark.long
def test_time_truth_of_devices_that_share_chunks(pool: Pool) -> None:
    """1F1B on two stages of two devices each."""
    case, on = shared_over_tp(2), piper.load_cluster("h100x4")
    spent = measured(case.plan, 0.01)
    simulated = piper.simulate(case.plan, on, costs=spent, contention=False)
    assert simulated.inside_comm_s > 0.2 * simulated.step_s, (
        "messages inside of steps are a part that shows"
    )
    found: list[float] = []
    while len(found) < ATTEMPTS and not (found and abs(found[-1]) <= TOLERANCE):
        emulated = emulate(case, cluster=on, costs=spent, trace=True, pool=pool)
        assert starts(emulated.trace) == starts(simulated.trace)
        found.append(emulated.step_s[0] / simulated.step_s - 1)
    assert abs(found[-1]) <= TOLERANCE, found
