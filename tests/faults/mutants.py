"""The mutation score: seeded faults in compiler and runtime, and which check catches each.

`python -m tests.faults.mutants` prints the table. A compiler fault changes a finished plan: plan_faults.py,
update_faults.py, schedule_faults.py, sharding_faults.py, recompute_faults.py, layout_faults.py, expert_faults.py,
host_faults.py, feature_faults.py, message_faults.py (peaks are computed after it). A runtime fault is one of
runtime_faults.py, a job fault one of job_faults.py, sharer_faults.py, expert_faults.py, dropless_faults.py,
backward_faults.py, loss_faults.py, precision_faults.py or state_faults.py. Each is tried on the cases below until
`verify` or the parity suite objects. The exit code is 1 if a fault survives.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import torch

from piper_ir.fold.memory import with_peaks
from piper_ir.ground.errors import PiperError, PlanError
from piper_ir.plan.plan import Plan
from piper_ir.verify import check
from tests.faults import runtime_faults as faults
from tests.faults.backward_faults import BACKWARDS
from tests.faults.dropless_faults import DROPLESS
from tests.faults.expert_faults import EXPERT_PLANS, EXPERT_RUNS
from tests.faults.feature_faults import FEATURES
from tests.faults.host_faults import HOSTS
from tests.faults.job_faults import JOBS, JobFault
from tests.faults.layout_faults import LAYOUTS
from tests.faults.loss_faults import LOSSES, TILES
from tests.faults.message_faults import ALONE, CASTS, MESHES, ROWS
from tests.faults.plan_faults import COMPILER, Change
from tests.faults.precision_faults import FLOAT8
from tests.faults.recompute_faults import RECOMPUTE
from tests.faults.schedule_faults import SCHEDULE
from tests.faults.sharding_faults import SHARDING
from tests.faults.sharer_faults import PIECES, SHARERS
from tests.faults.state_faults import STATES
from tests.faults.update_faults import UPDATES
from tests.helpers import compositions, parity
from tests.helpers.compositions import Composition

CASES: tuple[Composition, ...] = (
    Composition("gpt", 2, 2, 4, "1f1b", bucket_mb=0.002),
    Composition("keywords", 2, 2, 4, "1f1b", rows=1),
    Composition("skip", 4, 1, 4, "gpipe"),
    Composition("gpt", 2, 1, 4, "1f1b", optimizer="adamw", clip=0.05, scheduler=True),
    Composition("gpt_dropout", 2, 1, 4, "1f1b"),
    Composition("buffers", 1, 1, 4, "random", seed=1),
    Composition("gpt", 2, 2, 4, "1f1b", "shared", bucket_mb=0.002),
    Composition("gpt", 2, 2, 4, "1f1b", "v", backward="split", bucket_mb=0.002),
    Composition("gpt_untied", 2, 1, 4, "random", "v", backward="mixed", overlap=True, seed=2),
    Composition("gpt_refilled", 2, 1, 4, "zbv"),
    Composition("gpt_untied", 2, 1, 2, "gpipe", optimizer="adafactor"),
    Composition("gpt", 2, 2, 4, "1f1b", optimizer="adamw", clip=0.05, bucket_mb=0.002, zero=3),
    Composition("gpt", 2, 2, 2, "1f1b", optimizer="adamw", clip=0.05, bucket_mb=0.002, zero=1),
    Composition("gpt_dropout", 2, 1, 4, "1f1b", keep="inputs"),
    Composition("gpt", 2, 1, 4, "1f1b", backward="split", keep="products"),
    Composition("gpt", 2, 2, 4, "1f1b", bucket_mb=0.002, precision="mixed"),
    Composition("gpt", 1, 2, 2, optimizer="adamw", clip=0.05, tp=2, stream="tokens"),
    Composition("gpt", 2, 2, 2, "1f1b", optimizer="adamw", clip=0.05, tp=2),
    Composition("llama", 1, 1, 2, optimizer="adamw", clip=0.05, tp=4),
    Composition("gpt", 1, 1, 2, tp=2, stream="tokens", pieces=2),
    Composition("gpt_dropout", 1, 1, 2, tp=2, stream="tokens"),
    Composition("keywords", 1, 2, 2, tp=2, stream="tokens"),
    Composition("gpt", 1, 1, 2, cp=2, attention="ring"),
    Composition("moe", 1, 4, 2, optimizer="adamw", clip=0.05, ep=2),
    Composition("steered", 1, 4, 1, optimizer="adamw", clip=0.05, ep=4),
    Composition("gpt", 2, 2, 2, "1f1b", scaled=True),
    Composition("gpt", 2, 2, 4, "1f1b", bucket_mb=0.002, waits="all"),
    Composition("steered", 1, 4, 2, optimizer="adamw", clip=0.05, ep=2, hidden="etp", zero=1),
    Composition("steered", 1, 4, 1, optimizer="adamw", clip=0.05, tp=2, stream="tokens", ep=2, hidden="tp"),
    Composition("gpt", 1, 2, 2, optimizer="adamw", clip=0.05, cp=2, attention="ring", zero=3, over_cp=True, bucket_mb=0.002),
    Composition("gpt", 2, 2, 2, "1f1b", optimizer="adamw", bucket_mb=0.002, zero=1, hosted="optim"),
    Composition("gpt", 2, 2, 2, "1f1b", optimizer="adamw", bucket_mb=0.002, zero=3, hosted="states"),
    Composition("gpt", 1, 2, 2, optimizer="adamw", clip=0.05, zero=3, whole_mb=0.0015, overlap_states=False, bucket_mb=0.002),
    Composition("gpt", 3, 1, 4, "1f1b", at=(1, 1)),
    Composition("gpt", 2, 2, 2, "1f1b", optimizer="adamw", clip=0.05, zero=1, bucket_mb=0.001, precision="narrow messages"),
    Composition("gpt", 1, 4, 2, optimizer="adamw", clip=0.05, zero=3, rep=2, bucket_mb=0.001, precision="narrow messages"),
    Composition("gpt", 2, 2, 2, "1f1b", bucket_mb=0.002, zero=3, overlap_states=False, axes=("pp", "dp")),
)  # fmt: skip
"""Tied weights and many buckets on both axes; uneven weights; values that skip stages; groups, clipping and a schedule;
dropout; buffers; a stage on two devices; split backwards with two chunks on a device, reduced and alone; a batch
function that refills its tensors, where a device loads inputs of two microbatches before targets; an optimizer that is
not element-wise; ranks that share all states, or those of the optimizer; recomputation, with dropout and with split
backwards; mixed precision; devices that share chunks: with their tokens, as stages, with fewer heads of keys than
devices, with dropout, with uneven weights; devices that share tokens, with keys that go around in a ring; devices that
share experts, each with rows of its own; such a mixture without a capacity, whose tokens all go to one device; a scaled loss;
tensors that wait on the host; experts that replicas, or devices along tp, cut; states over cp; states on the host, the
optimizer's and all; small parameters that stay whole, with messages that compute waits for; a stage without layers;
gradients that are reduced in a narrower dtype than that of their sums, with states shared and in part kept by replicas;
shared states without overlap, on a mesh whose stages are neighbours.
"""


def tolerance_of(case: Composition) -> float:
    """Return by how much a correct run of a case may differ from one device."""
    return parity.FLOAT64 if case.precision == "float64" else parity.FLOAT32


@dataclass(frozen=True)
class Mutant:
    """`where`: "compiler", "runtime" or "job"; `change` of the first, the name of a fault of the second, `run` of the
    last."""

    name: str
    where: str
    about: str
    change: Change | None = None
    run: JobFault | None = None


@dataclass(frozen=True)
class Result:
    """`verify`: the rules broken; `parity`: the first difference or error; both empty for a fault that survives.
    `case`: where it was seen."""

    mutant: Mutant
    verify: str
    parity: str
    case: str

    @property
    def caught(self) -> bool:
        return bool(self.verify or self.parity)


@cache
def plan_of(case: Composition) -> Plan:
    """The good plan of a case."""
    return compositions.compiled(case).plan


def judge(mutant: Mutant, by_all: bool = True, cases: Sequence[Composition] = CASES) -> Result:
    """Try a fault on the cases until it is caught, by `verify` and the parity suite or else by the first that catches
    it.

    ValueError when no case offers a place for it.
    """
    if mutant.run is not None:
        return _judge_run(mutant, mutant.run)
    tried = False
    for case in cases:
        plan: Plan | None = plan_of(case)
        assert plan is not None
        if mutant.change is not None and (plan := mutant.change(plan)) is not None:
            plan = _peaks(plan)
        if plan is None:
            continue
        tried = True
        rules = (
            ", ".join(dict.fromkeys(v.rule for v in check(plan)))
            if mutant.change is not None
            else ""
        )
        seen = _parity(mutant, case, plan) if by_all or not rules else ""
        if rules or seen:
            return Result(mutant, rules, seen, str(case))
    if not tried:
        raise ValueError(f"{mutant.name} finds no place in any case")
    return Result(mutant, "", "", "")


def _judge_run(mutant: Mutant, fault: JobFault) -> Result:
    """Try a fault of a job on the cases until it is caught."""
    tried = False
    for case in CASES:
        try:
            judged = fault(case)
        except PiperError as e:
            return Result(mutant, "", f"{type(e).__name__}: {str(e).splitlines()[0]}", str(case))
        if judged is None:
            continue
        tried = True
        found = parity.differences(parity.RunOutcome.of(judged[0]), judged[1], tolerance_of(case))
        if found:
            return Result(mutant, "", str(found[0]), str(case))
    if not tried:
        raise ValueError(f"{mutant.name} finds no place in any case")
    return Result(mutant, "", "", "")


def _peaks(plan: Plan) -> Plan:
    """The peaks that a compiler with this fault would have stated."""
    try:
        return with_peaks(plan)
    except (PlanError, KeyError):  # it frees what is not there; the stated peaks stay
        return plan


def _parity(mutant: Mutant, case: Composition, plan: Plan) -> str:
    with faults.inject(mutant.name) if mutant.change is None else nullcontext():
        try:
            run = compositions.run(case, plan)
        except (PiperError, RuntimeError) as e:  # torch refuses the sizes of a wrong plan
            return f"{type(e).__name__}: {str(e).splitlines()[0]}"
    found = parity.differences(
        parity.RunOutcome.of(run), compositions.expected(case), tolerance_of(case)
    )
    return str(found[0]) if found else ""


MUTANTS: tuple[Mutant, ...] = (
    *(
        Mutant(f.__name__, "compiler", (f.__doc__ or "").strip().splitlines()[0], f)
        for f in (
            *(*COMPILER, *UPDATES, *SCHEDULE, *SHARDING, *RECOMPUTE, *LAYOUTS, *EXPERT_PLANS),
            *(*HOSTS, *FEATURES, *CASTS, *ALONE, *MESHES),
        )
    ),
    *(Mutant(name, "runtime", fault.about) for name, fault in faults.FAULTS.items()),
    *(
        Mutant(f.__name__, "job", (f.__doc__ or "").strip().splitlines()[0], run=f)
        for f in (
            *(*JOBS, *SHARERS, *EXPERT_RUNS, *DROPLESS, *BACKWARDS, *LOSSES, *STATES),
            *(*TILES, *PIECES, *FLOAT8, *ROWS),
        )
    ),
)


def table(results: Iterable[Result]) -> str:
    """One line per fault: where it is, what it is, the rules of `verify` that it breaks, and what the parity suite sees
    first."""
    lines = [f"{'fault':<26} {'in':<9} {'verify':<30} parity"]
    for r in results:
        seen = r.parity if len(r.parity) < 110 else r.parity[:107] + "..."
        fate = "" if r.caught else f"  SURVIVES: {r.mutant.about}"
        lines.append(
            f"{r.mutant.name:<26} {r.mutant.where:<9} {r.verify or '-':<30} {seen or '-'}{fate}"
        )
    return "\n".join(lines)


def main() -> int:
    """Prints the table; 1 if a fault survives."""
    torch.set_num_threads(1)  # the tensors are tiny
    results = [judge(m) for m in MUTANTS]
    caught = sum(r.caught for r in results)
    print(table(results))
    print(
        f"\n{caught} of {len(results)} faults are caught ({sum(bool(r.verify) for r in results)} of them by verify)"
    )
    return 0 if caught == len(results) else 1


if __name__ == "__main__":
    ArgumentParser("python -m tests.faults.mutants", description=__doc__).parse_args()
    sys.exit(main())
