"""profile: what it measures, that a simulation finds all of it, and what it refuses. Nothing is said about how long
things take, but for a batch function that sleeps."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import piper
from piper.api.compiling.compiling import compile
from piper.api.ground.costs_file import load_costs, save_costs
from piper.api.running.profiling import _allocator, _host, _messages, _rows, profile
from piper.cli import app
from piper.views.costs_table import costs_table
from piper_ir.ground.errors import ExecutionError, FormatError, JobError, OutputError
from piper_ir.plan.plan_bytes import PlanBytes
from piper_ir.program.costs import AllocatorCosts, Costs, HostCosts
from piper_ir.program.ops import COMM, Compute
from piper_ir.tools import machine_name, time_text
from piper_runtime.launch.processes.processes import Pool
from piper_runtime.profile import MessageSample, ProfileReport
from piper_simulator import cpu_local, simulate
from tests.helpers import models
from tests.helpers.cases import each_case

NAP_S = 0.01
CASE = models.CASES["gpt"]


def nap(step: int, rows: range) -> tuple[Tensor, Tensor]:
    time.sleep(NAP_S)
    return CASE.batch(step, rows)


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-3)


JOB = piper.Job(CASE.model, nap, CASE.loss, adamw, global_batch=8, clip_norm=1.0)
PIPELINE = piper.Strategy(piper.Mesh(pp=2), piper.recipes.one_f_one_b(pp=2, microbatches=4))
DATA = piper.Strategy(
    piper.Mesh(dp=2),
    (
        *piper.recipes.gpipe(pp=1, microbatches=2),
        *piper.recipes.data_parallel(over=("dp",), bucket_mb=0.001),
    ),
)

HALVES = (piper.split(piper.where(), microbatches=2),)
STRATEGIES = {"1f1b": PIPELINE, "dp": DATA} | {
    f"zero={zero}, {keep}": piper.Strategy(
        piper.Mesh(dp=2),
        (
            *HALVES,
            *piper.recipes.data_parallel(zero=zero),
            piper.recompute(piper.where(), keep=keep),
        ),
    )
    for zero, keep in ((1, "inputs"), (2, "products"), (3, "inputs"))
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2) as workers:
        yield workers


@pytest.fixture(scope="module")
def costs(pool: Pool) -> Costs:
    return profile(JOB, PIPELINE, rows=[4], keep=["inputs"], repeats=2, pool=pool)


def test_every_step_of_every_code_is_measured_at_all_rows(costs: Costs) -> None:
    plan = compile(JOB, PIPELINE).plan
    ran = {
        (plan.chunk(p.op.chunk).code, p.op.step)
        for _, _, instr in plan.instructions()
        for p in instr.parts
        if isinstance(p.op, Compute)
    }
    once = {(s.code, s.step, s.rows) for s in costs.steps if s.step != "R"}
    assert once == {(c, s, r) for c, s in ran for r in (2, 4)}
    again = {(s.code, s.rows) for s in costs.steps if s.step == "R"}
    assert again and again <= {(f"{c}~inputs", r) for c, _ in ran for r in (2, 4)}, (
        "some make nothing again"
    )
    assert all(s.duration.seconds > 0 and s.duration.source == "measured" for s in costs.steps)
    assert {s.chunk for s in costs.steps} <= {c.id for c in plan.chunks}


@pytest.mark.long
def test_compiled_steps_are_measured_as_they_run(pool: Pool) -> None:
    """A whole backward is one step, B; steps that only a whole strategy has are refused by name."""
    where = piper.where
    more = piper.eager(where(stage=0)), piper.recompute(where(layer=2), keep="all")
    strategy = piper.Strategy(PIPELINE.mesh, (*PIPELINE.directives, *more))
    costs = profile(JOB, strategy, rows=[4], repeats=1, pool=pool, kernels="inductor")
    plan = compile(JOB, strategy, options=piper.Options(kernels="inductor")).plan
    ran = {
        (plan.chunk(op.variant).code, op.step)
        for role in plan.roles
        for op in role.table.ops
        if isinstance(op, Compute)
    }
    assert {step for _, step in ran} == {"F", "I", "W", "B"}, (
        "the first stage runs its steps one by one"
    )
    assert ran <= {(s.code, s.step) for s in costs.steps}
    assert all(s.duration.seconds > 0 for s in costs.steps)
    assert simulate(plan, cpu_local(), costs=costs).step_s > 0
    halves = piper.split(where(), microbatches=2), piper.split_backward(where())
    split = piper.Strategy(piper.Mesh(dp=2), (*halves, *piper.recipes.data_parallel()))
    with pytest.raises(JobError, match=r"kernels='inductor'.*steps I and W.*split_backward"):
        profile(JOB, split, rows=[4], repeats=1, pool=pool, kernels="inductor")


def test_messages_of_the_plan_and_a_grid_up_to_the_gradient_are_measured(costs: Costs) -> None:
    plan = compile(JOB, PIPELINE).plan
    traffic = PlanBytes(plan)
    own = {
        traffic.message_bytes(p.op, p)
        for _, _, i in plan.instructions()
        for p in i.parts
        if isinstance(p.op, COMM)
    }
    for op in ("p2p", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        sizes, least = costs.bytes_of(op, 2), 4 if op in ("p2p", "all_reduce") else 1024
        assert (
            {size for size in own if size >= least} <= set(sizes)
            and min(own) < sizes[0] * 2
            and sizes[0] >= least
        )
        assert sizes[-1] >= 4 * sum(p.numel() for p in CASE.model().parameters())
    assert {c.nodes for c in costs.comm} == {1}


def test_a_batch_function_that_sleeps_is_seen_in_batch_and_not_in_load(costs: Costs) -> None:
    found = costs.of_part("Batch", 2)
    assert found is not None and found.seconds >= NAP_S
    assert {p.op for p in costs.parts} >= {
        "Batch",
        "Load",
        "Seed",
        "SquaredNorm",
        "Update",
        "Fresh",
        "Fold",
    }
    updates = [p.amount for p in costs.parts if p.op == "Update"]
    assert len(updates) == 5, "the whole model's, each stage's, a half's and an eighth's"


def test_it_says_where_it_comes_from(costs: Costs) -> None:
    origin, plan = costs.origin, compile(JOB, PIPELINE).plan
    assert origin is not None
    assert (origin.device, origin.cluster, origin.ranks, origin.threads) == (
        machine_name(),
        "cpu-local",
        2,
        1,
    )
    assert (origin.program, origin.repeats, origin.torch) == (plan.program_key, 2, version("torch"))
    assert costs.allocator is None or costs.allocator.factor >= 1


@each_case("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_a_simulation_finds_all_of_it(costs: Costs, strategy: piper.Strategy) -> None:
    """Nothing is computed by formula, of another strategy either; with the sleeps the batch function dominates."""
    prediction = simulate(compile(JOB, strategy, costs=costs).plan, cpu_local(), costs=costs)
    assert prediction.notes == ()
    shares = prediction.summary()["sources"]
    assert set(shares) <= {"measured", "interpolated"} and shares["measured"] > 0.5
    assert prediction.period_s >= 2 * NAP_S


def test_what_an_older_file_lacks_is_computed_and_named(costs: Costs, tmp_path: Path) -> None:
    comm = tuple(c for c in costs.comm if c.op in ("p2p", "all_reduce"))
    old = replace(
        costs, comm=comm, parts=tuple(p for p in costs.parts if p.op not in ("Fresh", "Fold"))
    )
    save_costs(tmp_path / "old.json", old)
    plan = compile(JOB, STRATEGIES["zero=2, products"]).plan
    found = simulate(plan, cpu_local(), costs=load_costs(tmp_path / "old.json"))
    assert "formula" in found.summary()["sources"]
    (note,) = (n for n in found.notes if n.startswith("not in the costs, computed by formula: "))
    assert "all_gather of " in note and "reduce_scatter of " in note


def test_the_workers_can_be_used_for_a_run_afterwards(costs: Costs, pool: Pool) -> None:
    run = piper.execute(compile(JOB, PIPELINE), steps=1, launcher="processes", pool=pool)
    assert len(run.losses) == 1


def test_a_costs_file_is_read_as_it_was_written(costs: Costs, tmp_path: Path) -> None:
    path = tmp_path / "below" / "costs.json"
    save_costs(path, costs)
    assert load_costs(path) == costs
    text = costs_table(costs, title="costs").plain()
    assert (
        "F, 4 rows" in text and "p2p of 4 bytes, 2 ranks" in text and "median of 2 repeats" in text
    )
    with pytest.raises(
        FormatError, match=r"cannot read the costs file .*none.json.*`piper profile FILE.py --out"
    ):
        load_costs(tmp_path / "none.json")
    with pytest.raises(OutputError, match="cannot write the costs to"):
        save_costs(path / "file", costs)


def test_the_allocator_is_a_line_through_two_numbers_of_rows() -> None:
    """1000 bytes of tensors: 5000 are resident; 3000: 8000, on the rank with more. 1.5 bytes per byte, 3500 without
    any."""
    found = _allocator(
        [[(1000, 5000), (2000, 9999), (3000, 7000)], [(1000, 4000), (2000, 5000), (3000, 8000)]]
    )
    assert found == AllocatorCosts(3500, 1.5)
    assert _allocator([[(1000, 5000), (2000, 5500)]]) == AllocatorCosts(3500, 1.0), (
        "tensors are resident"
    )
    assert _allocator([[(1000, 5000)]]) is _allocator([]) is None


RECIPE = """
import torch
import piper

class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

def batch(step, rows):
    return torch.ones(len(rows), 4), torch.ones(len(rows), 4)

def optimizer(named):
    return torch.optim.SGD([p for _, p in named], lr=0.1)

job = piper.Job(MLP, batch, torch.nn.functional.mse_loss, optimizer, global_batch=4)
strategy = piper.Strategy(piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=2))
"""


def test_the_issuing_thread_takes_time_for_every_instruction_and_more_for_a_message(
    costs: Costs,
) -> None:
    host = costs.host
    assert host is not None and host.issue_s > 0 and host.comm_s > 0
    lines = costs_table(costs, title="costs").plain().splitlines()
    found = {
        "an instruction": (host.issue_s, host.issue_spread_s),
        "a communication": (host.comm_s, host.comm_spread_s),
    }
    for name, (seconds, spread) in found.items():
        (line,) = [x for x in lines if x.startswith(f"issue of {name}")]
        assert time_text(seconds) in line and f"{spread / seconds * 100:.1f} %" in line


def test_the_spread_of_host_seconds_is_over_all_repeats_and_ranks() -> None:
    reports = [
        ProfileReport(issue=[1.0, 2.0, 9.0], talk=[5.0]),
        ProfileReport(issue=[3.0, 4.0], talk=[-1.0]),
    ]
    assert _host(reports) == HostCosts(3.0, 2.5, 1.0, 2.5)


@pytest.mark.long
def test_from_the_command_line(
    costs: Costs, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command uses the workers that are there; tests/cli/test_cli_loop.py lets it start its own."""
    monkeypatch.setattr("piper_runtime.launch.open_pool", lambda *_, **__: nullcontext(pool))
    recipe, file, other = tmp_path / "recipe.py", tmp_path / "costs.json", tmp_path / "other.json"
    recipe.write_text(RECIPE)
    found = CliRunner().invoke(
        app, ["profile", str(recipe), "--rows", "2", "--repeats", "1", "--out", str(file)]
    )
    assert found.exit_code == 0, found.output
    assert "layer0 F, 2 rows" in found.stdout and f"costs are in {file}" in found.stderr
    found = CliRunner().invoke(app, ["simulate", str(recipe), "--costs", str(file), "--json"])
    assert found.exit_code == 0 and set(json.loads(found.stdout)["sources"]) == {"measured"}
    save_costs(other, costs)
    found = CliRunner().invoke(app, ["simulate", str(recipe), "--costs", str(other)])
    assert found.exit_code == 0 and "warning: the costs (program " in found.output, (
        "of another model"
    )
    assert "none of the 3 chunks has a cost" in " ".join(found.output.split())


@each_case(
    ("batch", "own", "rows"),
    [
        (32, 4, [1, 2, 4, 8, 16]),
        (64, 8, [2, 4, 8, 16, 32]),
        (12, 3, [1, 3, 6]),
        (30, 15, [1, 3, 6, 15]),
        (1, 1, [1]),
        (7, 7, [1, 7]),
    ],
)
def test_rows_are_divisors_a_factor_of_two_apart(batch: int, own: int, rows: list[int]) -> None:
    assert _rows(batch, None, own) == rows
    assert all(batch % r == 0 for r in rows)


@pytest.mark.long
def test_the_same_over_ray(costs: Costs) -> None:
    found = profile(JOB, PIPELINE, launcher="ray", rows=[4], keep=["inputs"], repeats=1)
    assert found.origin is not None and found.origin.launcher == "ray"
    assert [(s.code, s.step, s.rows) for s in found.steps] == [
        (s.code, s.step, s.rows) for s in costs.steps
    ]
    assert [(c.op, c.bytes, c.group, c.nodes) for c in found.comm] == [
        (c.op, c.bytes, c.group, c.nodes) for c in costs.comm
    ]


@each_case("rows", [[0], [9], [True], ["2"]])
def test_rows_that_no_strategy_uses_are_refused(rows: list[int]) -> None:
    with pytest.raises(JobError, match="is no number of rows of a batch of 8"):
        profile(JOB, PIPELINE, rows=rows)


def test_other_launchers_and_no_repeats_are_refused() -> None:
    with pytest.raises(
        ExecutionError,
        match=r"profile\(launcher='inline'\): \"processes\" and \"ray\" are accepted",
    ):
        profile(JOB, PIPELINE, launcher="inline")
    with pytest.raises(JobError, match=r"profile\(repeats=0\): an integer of at least 1 is needed"):
        profile(JOB, PIPELINE, repeats=0)


def broken(step: int, rows: range) -> tuple[Tensor, Tensor]:
    if step:
        raise ValueError("no such file")
    return CASE.batch(step, rows)


def test_a_batch_function_that_fails_is_named(pool: Pool) -> None:
    with pytest.raises(ExecutionError, match="ValueError: no such file"):
        profile(replace(JOB, batch=broken), PIPELINE, rows=[2], repeats=1, pool=pool)


def test_a_device_that_tells_nothing_of_messages_has_no_cost_of_them() -> None:
    """A CUDA device is one."""
    found = _host([ProfileReport(issue=[3e-6, 1e-6, 2e-6]), ProfileReport(issue=[-1e-6])])
    assert found.issue_s == 1.5e-6 and found.comm_s == 0.0


def test_of_blocks_of_messages_the_calm_half_counts() -> None:
    """Other programs had a core in blocks 0 and 1, seen by one end of the message or the other."""
    waited = (0.9, 0.0, 0.0, 0.1), (0.0, 0.5, 0.1, 0.0)
    seconds = (9.0, 8.0, 2.0, 1.0), (9.5, 8.5, 4.0, 3.0)
    blocks = zip(seconds, waited, strict=True)
    reports = [
        ProfileReport(messages=[MessageSample("p2p", 4, (0, 1), s, s, w)], node="here")
        for s, w in blocks
    ]
    (found,) = _messages(reports)
    assert (found.duration.seconds, found.busy_s, found.nodes) == (2.5, 2.5, 1)
