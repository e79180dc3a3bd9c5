"""The inline engine: equal to one device, deadlocks and failures named, faults noticed."""

import gc
import os
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from packages.runtime.tests.chains import TOLERANCE, chain, distance, run
from packages.runtime.tests.handmade import CODE, adamw, batch
from piper_ir.fold.memory import scan
from piper_ir.ground.errors import ExecutionError, JobError, NonFiniteLossError
from piper_ir.plan.plan import COMPUTE, Plan
from piper_ir.tools.units import size_text
from piper_runtime import execute
from piper_runtime.launch.ground.report import StepRecord
from piper_runtime.rank.binding.rank import Binder, Rank
from piper_runtime.rank.values.code import ShippedCode
from tests.faults import runtime_faults as faults
from tests.helpers.cases import each_case

CASES: dict[str, dict[str, Any]] = {
    "one rank": dict(pp=1, microbatches=1),
    "gpipe": dict(schedule="gpipe"),
    "1f1b": dict(),
    "unfused": dict(fuse=False),
    "pp 4": dict(layers=7, pp=4),
    "dp": dict(pp=1, dp=2, microbatches=1),
    "pp and dp": dict(dp=2),
    "tied over stages": dict(tied=True, dp=2),
    "uneven weights": dict(masked=True, dp=2),
    "clipped": dict(dp=2, clip_norm=0.05),
    "clipped and weighted and tied": dict(
        tied=True, dp=2, masked=True, clip_norm=0.01, schedule="gpipe"
    ),
    "dropout": dict(drop=True, dp=2),
    "adamw in two groups": dict(optimizer=adamw, dp=2),
    "learning rates": dict(scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_plan_trains_what_one_device_trains(name: str) -> None:
    plan, job = chain(**CASES[name])
    assert distance(run(plan, job), plan, job) < TOLERANCE


def test_fused_and_unfused_plans_are_equal_to_the_bit() -> None:
    (fused, job), (plain, _) = chain(fuse=True), chain(fuse=False)
    a, b = run(fused, job), run(plain, job)
    assert a.losses == b.losses
    assert all(torch.equal(t, b.state_dict()[n]) for n, t in a.state_dict().items())


def test_buffers_count_microbatches_in_order_and_the_state_dict_has_every_name() -> None:
    plan, job = chain(tied=True)
    state = run(plan, job).state_dict()
    assert float(state["count"]) == 3 * 4
    assert state.keys() == job.model().state_dict().keys()
    assert torch.equal(state["head"], state["layers.0"]) and torch.equal(
        state["frozen"], torch.ones(3, dtype=torch.float64)
    )


def test_a_run_tells_times_and_spans() -> None:
    plan, job = chain()
    found = run(plan, job, steps=5, trace=True)
    assert len(found.step_s) == 5 and found.period_s is not None and found.peak_bytes == {}
    assert len(found.trace.spans) == sum(
        len(r.program) for r in plan.roles
    ) and found.trace.losses == tuple(found.losses)
    assert all(s.end >= s.start >= 0 and s.start >= s.ready for s in found.trace.spans)
    assert any(s.bytes for s in found.trace.spans)
    assert run(plan, job).trace.spans == () and run(plan, job).period_s is None


def with_waits(plan: Plan, role: str, index: int, waits: tuple[tuple[str, int], ...]) -> Plan:
    def changed(r: Any) -> Any:
        if r.role != role:
            return r
        return replace(
            r,
            program=tuple(
                replace(x, waits=waits) if i == index else x for i, x in enumerate(r.program)
            ),
        )

    return replace(plan, roles=tuple(changed(r) for r in plan.roles))


def test_a_deadlock_names_who_waits_for_what() -> None:
    plan, job = chain(schedule="gpipe")
    role = plan.roles[1]
    index, stream = next((i, x.stream) for i, x in enumerate(role.program) if x.stream != COMPUTE)
    with pytest.raises(
        ExecutionError,
        match=r"deadlock; rank 0 is at .* its peers 1 on channel .*rank 1 is at .*99 of compute",
    ):
        run(with_waits(plan, role.role, index, ((COMPUTE, 99),)), job)
    assert stream != COMPUTE


def test_a_failure_names_rank_step_and_instruction() -> None:
    def broken(step: int, rows: range) -> Any:
        if step == 1:
            raise OSError("disk full")
        return batch(step, rows)

    plan, job = chain(batch=broken)
    with pytest.raises(
        ExecutionError,
        match=r"rank 0, step 1, instruction 0 \(load\.inputs@0.* on compute\): OSError: disk full",
    ):
        run(plan, job)


CUDA = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 1.00 GiB"
CPU = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 800 bytes. Error code 12"


@pytest.mark.parametrize(
    ("kind", "said", "launcher"),
    [
        ("torch.OutOfMemoryError", CUDA, "inline"),
        ("torch.OutOfMemoryError", CUDA, "processes"),
        ("RuntimeError", CPU, "inline"),
        ("MemoryError", "", "inline"),
    ],
)
def test_an_allocation_that_fails_names_the_bytes_of_the_plan(
    kind: str, said: str, launcher: str
) -> None:
    plan, job = chain(schedule="gpipe")
    failing = ShippedCode(f"import torch\ndef step(args):\n    raise {kind}({said!r})\n")
    code = {**CODE, "head.mean": {**CODE["head.mean"], "I": failing}}
    role = plan.role_of(1)
    usages = {u.instr: u.total for u in scan(plan, role)}
    with pytest.raises(ExecutionError) as failed:
        execute(plan, code, job, steps=1, launcher=launcher)
    told = re.search(
        r"rank 1, step 0, instruction (\d+) \(.* on compute\): (\w+Error)(?:: (.*))?\. The plan "
        r"says that the rank holds at most (\S+ \S+) \((.*)\) in this instruction, and (\S+ \S+) in (\S+), its peak",
        str(failed.value),
    )
    assert told is not None, failed.value
    assert (told[2], told[3]) == (kind.removeprefix("torch."), said or None)
    assert told[4] == size_text(usages[int(told[1])])
    assert "activation" in told[5]
    assert (told[6], told[7]) == (size_text(role.peak_bytes), role.program[role.peak_at].name)


@pytest.mark.parametrize("launcher", ["inline", "processes"])
def test_an_allocation_of_the_state_names_its_bytes(launcher: str) -> None:
    """The optimizer allocates in ranks alone: inline they call it for the second time, else in another process."""
    calls, home = [0], os.getpid()

    def large(named: Any) -> torch.optim.Optimizer:
        calls[0] += 1
        if os.getpid() != home or (launcher == "inline" and calls[0] > 1):
            raise RuntimeError(CPU)
        return adamw(named)

    plan, job = chain(optimizer=large)
    states = [sum(s.nbytes for s in role.states) for role in plan.roles]
    with pytest.raises(ExecutionError) as failed:
        execute(plan, CODE, job, steps=1, launcher=launcher)
    told = re.search(
        r"rank (\d), while it loads its state: .*can't allocate memory.*The plan says that the rank holds "
        r"(\S+ \S+) \((.*)\) before its first step, and (\S+ \S+) in (\S+), its peak",
        str(failed.value),
    )
    assert told is not None, failed.value
    assert told[2] == size_text(states[int(told[1])]) and "optim" in told[3]
    assert told[4] == size_text(plan.role_of(int(told[1])).peak_bytes)


def test_a_loss_that_is_not_finite_names_step_rank_and_microbatch() -> None:
    def poisoned(step: int, rows: range) -> Any:
        x, t = batch(step, rows)
        return (x * float("nan"), t) if step == 1 and rows.start == 4 else (x, t)

    plan, job = chain(batch=poisoned)
    with pytest.raises(
        NonFiniteLossError,
        match="the loss is nan in step 1 on rank 1, microbatch 2; check the batch and the learning rate",
    ):
        run(plan, job)


def test_the_advice_for_what_is_not_finite_is_no_setting_that_is_there() -> None:
    def poison(step: int, rows: range) -> Any:
        x, y = batch(step, rows)
        return x * float("nan"), y

    plan, job = chain(pp=1, batch=poison, clip_norm=0.5)
    with pytest.raises(NonFiniteLossError) as found:
        run(plan, job)
    assert "gradients are clipped already (Job(clip_norm=0.5))" in str(
        found.value
    ) and "clip gradients" not in str(found.value)


def test_a_batch_of_another_shape_is_told_the_ways_out() -> None:
    def short(step: int, rows: range) -> Any:
        x, y = batch(step, rows)
        return (x[:1], y[:1]) if step == 1 else (x, y)

    def narrow(step: int, rows: range) -> Any:
        x, y = batch(step, rows)
        return (x[:, :2], y) if step == 1 else (x, y)

    for wrong, way in (
        (short, "a last batch of fewer rows is left out, or filled up"),
        (narrow, "compile a plan for each length"),
    ):
        plan, job = chain(pp=1, batch=wrong)
        with pytest.raises(JobError, match=rf"the plan was made for \(2, .*{way}"):
            run(plan, job)


def test_a_batch_whose_weights_are_all_zero_is_refused() -> None:
    def masked_out(step: int, rows: range) -> Any:
        x, t = batch(step, rows)
        return x, -t.abs()

    plan, job = chain(masked=True, batch=masked_out)
    with pytest.raises(NonFiniteLossError, match="weights of the global batch sum to 0"):
        run(plan, job)


@each_case(
    ("result", "says"),
    [
        (lambda x, t: x, "a pair"),
        (lambda x, t: (x[:1], t), r"inputs of shape \(1, 4\)"),
        (lambda x, t: (x.long(), t), "inputs of torch.int64"),
        (lambda x, t: ({"x": x}, t), "no tensor inputs"),
    ],
)
def test_a_batch_that_does_not_fit_the_plan_is_refused(result: Any, says: str) -> None:
    plan, job = chain(batch=lambda step, rows: result(*batch(step, rows)))
    with pytest.raises(JobError, match=says):
        run(plan, job)


def test_what_does_not_fit_is_refused_before_anything_runs() -> None:
    plan, job = chain()
    with pytest.raises(JobError, match="a global batch of 8 rows, the job has 9"):
        run(plan, replace(job, global_batch=9))
    with pytest.raises(JobError, match="steps=0"):
        run(plan, job, steps=0)
    with pytest.raises(
        ExecutionError, match='launcher "emulated" needs the durations of a cluster'
    ):
        execute(plan, CODE, job, steps=1, launcher="emulated")
    with pytest.raises(ExecutionError, match="'mpi' is not known"):
        run(plan, job, launcher="mpi")


NOTICED_BY: dict[str, dict[str, Any]] = {
    "lose_tied_gradient": dict(tied=True),
    "omit_weight": dict(masked=True),
    "skip_scalar_reduce": dict(clip_norm=0.05, masked=True, dp=2),
    "omit_clip": dict(clip_norm=0.05),
    "wrong_random_state": dict(drop=True),
}


NEEDS_MORE = (
    *("short_add", "refilled_batch", "dead_plain_kernel"),
    *(
        "stale_copies",
        "stale_master",
        "no_master",
        "narrow_sums",
        "narrow_reduction",
        "kept_after_cast",
    ),
    *("mask_of_other_rows", "places_by_cut", "rows_of_the_microbatch", "step_that_draws"),
    *(
        "omit_unscaling",
        "next_scale",
        "skip_fold",
        "dirty_buffer",
        "stale_gather",
        "recompute_other_dropout",
        "recompute_stale",
    ),
)
"""A chain has no sums, its ranks load the tensors of a microbatch together, its optimizer is fused, all is in one
dtype, no states are shared, no loss is scaled and nothing is recomputed; tests/faults/mutants.py tries these."""


@each_case("fault", [f for f in faults.FAULTS if f not in NEEDS_MORE])
def test_every_fault_is_noticed(fault: str) -> None:
    plan, job = chain(**NOTICED_BY.get(fault, dict(dp=2)))
    assert distance(run(plan, job), plan, job) < TOLERANCE
    with faults.inject(fault):
        try:
            found = run(plan, job)
        except (ExecutionError, NonFiniteLossError):
            return
    assert distance(found, plan, job) > 1e-7
    assert Rank.binder == Binder()


@pytest.mark.long
def test_a_long_run_does_not_fill_the_memory() -> None:
    """A step leaves one record, whatever the number of ranks."""
    plan, job = chain(dp=2, microbatches=2)
    counts: list[int] = []

    def count(record: StepRecord) -> None:
        if record.step in (20, 120):
            gc.collect()
            counts.append(len(gc.get_objects()))

    made = run(plan, job, steps=121, gradients=False, on_step=count)
    assert len(made.losses) == 121 and counts[1] - counts[0] < 250


def test_the_gradients_of_a_run_are_those_of_each_step() -> None:
    plan, job = chain(dp=2, microbatches=2)
    assert [len(found) for found in run(plan, job, steps=4).rank_gradients.values()] == [4, 4, 4, 4]
