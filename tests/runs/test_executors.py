"""One contract for all executors: whoever runs a plan runs each instruction once, in the order of its stream, after
what it waits for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import piper
from piper.api.running.emulation import durations_on
from piper_ir.ground.trace import Span, Trace
from piper_ir.plan.plan import Plan
from piper_ir.plan.plan_bytes import PlanBytes
from piper_ir.program.ops import COMM
from piper_runtime import execute
from piper_runtime.launch.ground.run_options import RunOptions
from piper_runtime.launch.processes.emulation import emulate
from piper_runtime.launch.processes.processes import Pool
from tests.helpers import collective_model, collective_plans

CLOCK = 1e-6
"""Seconds by which clocks read in different threads may disagree."""


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def batch(step: int, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))[rows.start : rows.stop]
    return x, x.roll(1, dims=1)


def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


@cache
def compiled() -> piper.Compiled:
    job = piper.Job(
        MLP,
        batch,
        nn.functional.mse_loss,
        optimizer,
        global_batch=16,
        tokens_per_row=1,
        clip_norm=1.0,
    )
    recipe = [
        *piper.recipes.one_f_one_b(pp=2, microbatches=4),
        *piper.recipes.data_parallel(bucket_mb=0.0003),
    ]
    return piper.compile(job, piper.Strategy(piper.Mesh(pp=2, dp=2), recipe))


LAUNCHERS = ("inline", "processes", "ray", "emulated")
Runs = Callable[[str], piper.Run]
Executed = tuple[Plan, Trace]


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, pool: Pool) -> Runs:
    """The run of the plan by a launcher, once each; Ray is joined when it is asked for."""

    @cache
    def found(launcher: str) -> piper.Run:
        more: dict[str, Any] = {} if launcher in ("inline", "ray") else {"pool": pool}
        more |= {"cluster": "h100x8"} if launcher == "emulated" else {}
        more |= {"cluster": request.getfixturevalue("ray_address")} if launcher == "ray" else {}
        return piper.execute(compiled(), steps=3, launcher=launcher, trace=True, **more)

    return found


@cache
def by_hand(n: int) -> Plan:
    return collective_plans.plan(n)


def executed(n: int, launcher: str, pool: Pool) -> Trace:
    """A plan with every collective of values, on n ranks."""
    plan = by_hand(n)
    if launcher == "simulate":
        return piper.simulate(plan, "h100x8", steps=2).trace
    if launcher == "emulated":
        durations = durations_on(plan, piper.load_cluster("h100x8"))
        return emulate(plan, durations, RunOptions(steps=2, trace=True, pool=pool)).trace
    more = {"pool": pool} if launcher == "processes" else {}
    job, code = collective_model.job(n), collective_model.code(n)
    return execute(plan, code, job, steps=3, launcher=launcher, trace=True, **more).trace  # type: ignore[arg-type]  # one of them


RUNS: dict[str, Callable[[Runs, Pool], Executed]] = {
    "simulate": lambda run, pool: (
        compiled().plan,
        piper.simulate(compiled().plan, "h100x8", steps=2).trace,
    ),
    **{name: lambda run, pool, name=name: (compiled().plan, run(name).trace) for name in LAUNCHERS},
    **{
        f"{name}, collectives of {n}": lambda run, pool, name=name, n=n: (
            by_hand(n),
            executed(n, name, pool),
        )
        for name in ("simulate", "inline", "processes", "emulated")
        for n in (2, 4)
    },
}


def by_rank(trace: Trace) -> dict[int, list[Span]]:
    out: dict[int, list[Span]] = defaultdict(list)
    for span in trace.spans:
        out[span.rank].append(span)
    return out


def violations(plan: Plan, trace: Trace) -> list[str]:
    """Spans that overlap their predecessor on the stream, or start before something that they wait for has ended."""
    out = []
    for rank, spans in by_rank(trace).items():
        program = plan.role_of(rank).program
        at = {s.instr: s for s in spans}
        streams: dict[str, list[int]] = defaultdict(list)
        for k, instr in enumerate(program):
            mine = streams[instr.stream]
            before = [mine[-1]] if mine else []
            before += [streams[stream][n - 1] for stream, n in instr.waits]
            out += [
                f"rank {rank}: {at[k].name} before {at[j].name}"
                for j in before
                if at[k].start < at[j].end - CLOCK
            ]
            mine.append(k)
    return out


@pytest.mark.parametrize(
    "name", [*(n for n in RUNS if n != "ray"), pytest.param("ray", marks=pytest.mark.long)]
)
def test_whoever_runs_a_plan_keeps_the_contract(name: str, run: Runs, pool: Pool) -> None:
    """Every instruction runs once on every rank, in the order of its stream and after what it waits for; the members of
    a communication carry the bytes of its message."""
    plan, trace = RUNS[name](run, pool)
    assert trace.plan_key == plan.key and trace.kind in ("simulated", "executed")
    ranks = by_rank(trace)
    assert sorted(ranks) == list(range(plan.mesh.world))
    traffic = PlanBytes(plan)
    for rank, spans in ranks.items():
        program = plan.role_of(rank).program
        assert sorted(s.instr for s in spans) == list(range(len(program)))
        for span in spans:
            instr = program[span.instr]
            assert (span.name, span.stream) == (instr.name, instr.stream)
            assert span.start <= span.end
            if isinstance(instr.parts[0].op, COMM):
                message = traffic.message_bytes(instr.parts[0].op, instr.parts[0])
                assert span.bytes == message, span.name
    assert violations(plan, trace) == []
    # the negative control: a span that is moved early is noticed
    late = max(trace.spans, key=lambda s: s.start)
    early = replace(late, start=late.start - 1e3, end=late.end - 1e3)
    moved = tuple(early if s is late else s for s in trace.spans)
    assert violations(plan, replace(trace, spans=moved))


@pytest.mark.parametrize("launcher", ["processes", pytest.param("ray", marks=pytest.mark.long)])
def test_executors_agree_on_losses_parameters_and_memory(launcher: str, run: Runs) -> None:
    inline, processes = run("inline"), run(launcher)
    assert inline.losses == pytest.approx(processes.losses, rel=1e-6)
    assert inline.losses[-1] < inline.losses[0]
    ours, theirs = inline.state_dict(), processes.state_dict()
    assert ours.keys() == theirs.keys() == MLP().state_dict().keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-7)
    plan = compiled().plan
    predicted = piper.simulate(plan, "h100x8").peak_bytes
    for rank in range(plan.mesh.world):
        assert (
            inline.peak_bytes[rank]
            == processes.peak_bytes[rank]
            == predicted[rank]
            == plan.role_of(rank).peak_bytes
        )
