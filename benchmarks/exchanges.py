"""Print which part of the exchanges with experts no computation hides, simulated and emulated, under some schedules.

`python benchmarks/exchanges.py` takes two minutes, in which four processes sleep; with `--sweep` it simulates steps of
2 to 24 microbatches, and nothing runs. Devices along `ep` exchange the tokens of a mixture. An exchange is exposed
while its device computes nothing. It is *paired* if what sends it and what waits for it are computed in one overlap of
a forward with a backward, so that the other one can hide it. What begins and ends a step stands alone, and nothing
hides its exchanges.

The emulated run has processes, streams and messages, and sleeps for the simulated durations. There is no contention
here, since sleeps do not slow each other down.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

if __name__ == "__main__":  # run as a file, sys.path begins with this folder and not with the root
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import piper
from piper import Job, Mesh, Strategy, models, recipes
from piper.api.compiling.compiling import Compiled
from piper.api.running.emulation import emulate
from piper_compiler import Directive
from piper_compiler.durations import collective_seconds
from piper_compiler.passes.order.overlap import Interleaved, interleavings
from piper_compiler.recipes import Action, scheduled
from piper_ir.graph.graph import At, Graph
from piper_ir.ground.errors import DirectiveError
from piper_ir.ground.intervals import Interval, uncovered
from piper_ir.ground.trace import Trace
from piper_ir.plan.plan import COMPUTE, Part, Plan
from piper_ir.program.costs import CommDuration, Costs, Duration, HostCosts, StepDuration
from piper_ir.program.ops import Collective, Compute, Send
from piper_ir.program.program import Chunk
from piper_runtime.launch import Pool

CLUSTER = "h100x4"
PP, EP = 2, 2
EXPERTS: dict[str, float] = {"large experts": 1.0, "small experts": 0.3}
"""How long a step of the experts of a layer takes, in exchanges."""
ATTENTION, COMBINE, ENDS = 1.5, 0.1, 0.2
"""The same of a layer before its experts and after them, and of embedding and loss."""


def job(microbatches: int) -> Job:
    """Return a job of one row per microbatch and device."""
    sizes = models.MoEConfig(
        layers=4,
        width=256,
        heads=4,
        kv_heads=2,
        hidden=16,
        vocab=32,
        length=16384,
        experts=4,
        top_k=2,
    )
    return models.job(sizes, global_batch=EP * microbatches)


def durations(plan: Plan, experts: float) -> Costs:
    """Return durations in which an exchange takes as long as the compiler expects, and computing a multiple of that."""
    parts = [p for _, _, instr in plan.instructions() for p in instr.parts]
    (nbytes,) = {plan.values[p.reads[0]].nbytes for p in parts if _exchanges(p)}
    hops = {plan.values[p.reads[0]].nbytes for p in parts if isinstance(p.op, Send)}
    one = collective_seconds(nbytes)
    steps = {
        (c.cost_code(step), step): StepDuration(
            c.cost_code(step), step, plan.rows, Duration(one * _taken(c, experts), "given")
        )
        for c in plan.chunks
        for step in c.steps
    }
    comm = [
        CommDuration("all_to_all", nbytes, EP, Duration(one, "given")),
        *(
            CommDuration("p2p", n, 2, Duration(collective_seconds(n), "given"))
            for n in sorted(hops)
        ),
    ]
    return Costs(steps=tuple(steps.values()), comm=tuple(comm), host=HostCosts(0.0, 0.0))


def _taken(chunk: Chunk, experts: float) -> float:
    if chunk.experts:
        return experts
    if "layer" not in chunk.coords:
        return ENDS
    return COMBINE if "." in chunk.id else ATTENTION


# schedules


def paired(*, pp: int, microbatches: int) -> tuple[Directive, ...]:
    """Return 1F1B in which each forward overlaps with a backward, for which the devices begin with more forwards.

    On device r of p, 2 (p - 1 - r) + 1 forwards come first, so that the backward of a pair is there when its forward
    is. In 1F1B as it is, a forward waits for the backward beside it.
    """
    return scheduled(
        [_slots(r, 2 * (pp - 1 - r) + 1, microbatches) for r in range(pp)],
        microbatches=microbatches,
    )


def _slots(stage: int, ahead: int, microbatches: int) -> list[tuple[Action, ...]]:
    ahead = min(ahead, microbatches)
    forwards, backwards = (
        [Action(stage, phase, i) for i in range(microbatches)] for phase in ("F", "B")
    )
    pairs = list(zip(forwards[ahead:], backwards))
    return [*((f,) for f in forwards[:ahead]), *pairs, *((b,) for b in backwards[len(pairs) :])]


SCHEDULES: dict[str, Callable[..., Sequence[Directive]]] = {
    "1F1B": recipes.one_f_one_b,
    "1F1B, pairs overlapped": paired,
    "DualPipeV": recipes.dualpipe_v,
}


def compiled(
    work: Job, schedule: Sequence[Directive], *, pp: int = PP, costs: Costs | None = None
) -> Compiled:
    """Compile a schedule for devices that share experts."""
    rows = recipes.data_parallel(over=("ep",))
    return piper.compile(
        work,
        Strategy(Mesh(pp=pp, ep=EP), [*recipes.expert_parallel(channel="ep"), *schedule, *rows]),
        costs=costs,
    )


def earliest() -> AbstractContextManager[object]:
    """Let `compile` take the earliest of interleavings that end at the same time, whether it hides messages or not."""

    def alike(graph: Graph, seconds: Mapping[At, float]) -> Iterator[Interleaved]:
        return (Interleaved(order.graph) for order in interleavings(graph, seconds))

    return patch("piper_compiler.compile.interleavings", alike)


def four_orders() -> AbstractContextManager[object]:
    """Let `compile` choose among the interleavings that do not look at messages."""
    return patch("piper_compiler.passes.order.overlap.hidden", lambda *_: None)


# what is exposed


@dataclass(frozen=True)
class Exchange:
    """Hold an exchange of one rank: its seconds, and those of them in which the rank computes nothing."""

    seconds: float
    exposed: float
    paired: bool


def exchanges(made: Compiled, trace: Trace) -> list[Exchange]:
    """Return the exchanges with experts in a trace, of each rank that has spans."""
    plan, pairs = made.plan, _pairs(made.graph)
    role_of = {rank: role for role in plan.roles for rank in role.ranks}
    out: list[Exchange] = []
    for rank in sorted({s.rank for s in trace.spans}):
        spans = [s for s in trace.spans if s.rank == rank]
        working: list[Interval] = sorted(
            (s.start, s.end) for s in spans if s.stream == COMPUTE and s.end > s.start
        )
        together = _together(plan, role_of[rank].role, pairs)
        for span in spans:
            if (k := span.instr) in together:
                out.append(
                    Exchange(
                        span.end - span.start,
                        uncovered([(span.start, span.end)], working),
                        together[k],
                    )
                )
    return out


_Place = tuple[str, str, int]
"""A chunk, a step of it, and a microbatch."""


def _pairs(graph: Graph) -> list[set[_Place]]:
    """Return what is computed in each overlap; a backward that is a node of the graph is two steps in a plan."""
    found: list[set[_Place]] = []
    for group in graph.overlaps:
        nodes = [(graph.at(at), at[1]) for at in group.nodes]
        steps = [(n.op, mb) for n, mb in nodes if n is not None and isinstance(n.op, Compute)]
        found.append(
            {
                (op.chunk, step, mb)
                for op, mb in steps
                for step in ("IW" if op.step == "B" else op.step)
            }
        )
    return found


def _together(plan: Plan, role: str, pairs: Sequence[set[_Place]]) -> dict[int, bool]:
    """Return of each instruction of a role that exchanges whether it stands within a pair."""
    program = plan.role(role).program
    wrote = {v: p for p in _computing(plan, role) for v in p.writes}
    read = {v: p for p in _computing(plan, role) for v in p.reads}
    out: dict[int, bool] = {}
    for k, instr in enumerate(program):
        part = instr.parts[0]
        if _exchanges(part):
            ends = {_place(wrote[part.reads[0]]), _place(read[part.writes[0]])}
            out[k] = any(ends <= pair for pair in pairs)
    return out


def _exchanges(part: Part) -> bool:
    return isinstance(part.op, Collective) and part.op.kind == "all_to_all"


def _computing(plan: Plan, role: str) -> Iterator[Part]:
    return (
        p for instr in plan.role(role).program for p in instr.parts if isinstance(p.op, Compute)
    )


def _place(part: Part) -> _Place:
    assert isinstance(part.op, Compute)
    return part.op.chunk, part.op.step, part.mb


def share(found: Sequence[Exchange]) -> float:
    """Return the exposed part of the time of exchanges."""
    seconds = sum(e.seconds for e in found)
    return sum(e.exposed for e in found) / seconds if seconds else 0.0


# the table


@dataclass(frozen=True)
class Timed:
    """Hold what a trace says: a step in exchanges, and the exposed part of all exchanges and of those in pairs.

    `paired` is None where no exchange is.
    """

    step: float
    whole: float
    paired: float | None

    def __str__(self) -> str:
        pairs = "      -" if self.paired is None else f"{self.paired:7.1%}"
        return f"{self.step:9.2f} {self.whole:7.1%} {pairs}"


def timed(made: Compiled, trace: Trace, step_s: float, costs: Costs) -> Timed:
    """Return the figures of a trace of a step."""
    found = exchanges(made, trace)
    pairs = [e for e in found if e.paired]
    return Timed(
        step_s / costs.comm[0].duration.seconds, share(found), share(pairs) if pairs else None
    )


def simulated(made: Compiled, costs: Costs) -> Timed:
    """Return the figures of a simulated step."""
    found = piper.simulate(made.plan, CLUSTER, costs=costs, contention=False)
    return timed(made, found.trace, found.step_s, costs)


def emulated(made: Compiled, costs: Costs, pool: Pool | None = None) -> Timed:
    """Return the figures of an emulated step."""
    found = emulate(made, cluster=CLUSTER, costs=costs, trace=True, pool=pool)
    return timed(made, found.trace, found.step_s[0], costs)


def rows(microbatches: int, pool: Pool) -> Iterator[str]:
    """Yield a line of the table for each schedule and size of experts."""
    for size, experts in EXPERTS.items():
        for title, make in SCHEDULES.items():
            schedule, work = make(pp=PP, microbatches=microbatches), job(microbatches)
            costs = durations(compiled(work, schedule).plan, experts)
            made = compiled(work, schedule, costs=costs)
            with four_orders():
                plain = simulated(compiled(work, schedule, costs=costs), costs)
            first, then = simulated(made, costs), emulated(made, costs, pool)
            yield (
                f"{size:<14} {title:<24} {plain} {first} {then} {then.step / first.step - 1:+7.1%}"
            )


SWEPT: dict[str, Callable[..., Sequence[Directive]]] = {**SCHEDULES, "ZBV": recipes.zbv}
COUNTS = (2, 3, 4, 5, 6, 8, 12, 16, 24)


def swept(
    title: str, experts: float, counts: Sequence[int] = COUNTS
) -> Iterator[tuple[int, Timed, Timed]]:
    """Yield the figures of a schedule by its number of microbatches: by the earliest of equals, and by the one that
    hides."""
    for microbatches in counts:
        work = job(microbatches)
        try:
            schedule = SWEPT[title](pp=PP, microbatches=microbatches)
        except DirectiveError:
            continue  # too few microbatches for it
        costs = durations(compiled(work, schedule).plan, experts)
        with earliest():
            before = simulated(compiled(work, schedule, costs=costs), costs)
        yield microbatches, before, simulated(compiled(work, schedule, costs=costs), costs)


def sweep(counts: Sequence[int]) -> None:
    """Print how much of the exchanges is exposed in steps of several sizes."""
    print(
        "step: in exchanges; all, paired: the exposed part of all exchanges and of those in pairs"
    )
    print(f"{'':<42} {'earliest of equals':>25} {'of equals one that hides':>25}")
    print(f"{'':<42}" + 2 * f" {'step':>9} {'all':>7} {'paired':>7}")
    for size, experts in EXPERTS.items():
        for title in SWEPT:
            for microbatches, before, after in swept(title, experts, counts):
                print(f"{size:<14} {title:<24} {microbatches:>2} {before} {after}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description="Print which part of the exchanges with experts no computation hides."
    )
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument(
        "--sweep", action="store_true", help="steps of 2 to 24 microbatches, simulated only"
    )
    options = parser.parse_args(argv)
    if options.sweep:
        sweep(COUNTS)
        return 0
    microbatches = options.microbatches
    print(
        "step: in exchanges; all, paired: the exposed part of all exchanges and of those in pairs"
    )
    print(f"{'':<39} {'four orders, simulated':>25} {'simulated':>25} {'emulated':>25}")
    print(f"{'':<39}" + 3 * f" {'step':>9} {'all':>7} {'paired':>7}" + " emulated/simulated")
    with Pool(PP * EP) as pool:
        for row in rows(microbatches, pool):
            print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
