"""Compare all-reduces by formula with measured ones.

Link constants are fitted on half of the world sizes and judged on the other half. There are two published sets: 2 to
128 A100 on Azure, 8 per node; 2 to 8 A100 of one node. World sizes are split by turns, in ascending order, and both
halves take their turn as the judged one. An error is |predicted / measured - 1|, at MIB and more; the mean is over all
sizes and worlds of the judged halves. Beside it stand a fit on all of the set, the constants of built-in devices, and
the table at sizes that it was not told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from benchmarks.measure import Goal, Row
from piper_ir.program.costs import CommDuration, Costs
from piper_simulator import Cluster, KeyPath, by_formula, load_cluster, rank_group, read_messages

MIB = 1 << 20
GOAL = Goal("below", 10)
NAME = "a100-40g-sxm"
PUBLISHED = Path(__file__).parent / "published"
CONSTANTS = {
    "intra_bandwidth": 231e9,
    "inter_bandwidth": 16e9,
    "start_s": 40e-6,
    "hop_factor": 1.0,
    "net_hop_factor": 1.0,
    "ll_fraction": 0.25,
    "pass_bandwidth": 800e9,
}
"""What is fitted, and from where the fit starts: bandwidths of the links, and the corrections of
`piper_simulator.cluster.nccl.Nccl`."""
WITHIN = tuple(k for k in CONSTANTS if k not in ("inter_bandwidth", "net_hop_factor"))
"""Those that one node shows."""
ITERATIONS, QUICK_ITERATIONS = 400, 60
Constants = dict[str, float]


@dataclass(frozen=True)
class Measured:
    """Hold a published set, and the constants that it can say something about."""

    name: str
    rows: tuple[CommDuration, ...]
    fitted: tuple[str, ...]

    @property
    def worlds(self) -> list[int]:
        return sorted({r.group for r in self.rows})


def measured() -> Iterator[Measured]:
    """Return both sets, at the sizes that are judged."""
    azure = load_cluster(f"{NAME}:8*16").links.messages
    vtrain = read_messages(PUBLISHED / "all_reduce-a100-vtrain.csv", KeyPath("benchmarks"))
    for name, rows, fitted in (
        ("2 to 128 A100, Azure", azure, tuple(CONSTANTS)),
        ("2 to 8 A100, one node", vtrain, WITHIN),
    ):
        yield Measured(name, tuple(r for r in rows if r.bytes >= MIB), fitted)


def rows(quick: bool) -> Iterator[Row]:
    """Return for each set the goal, each half, and what stands beside it."""
    iterations = QUICK_ITERATIONS if quick else ITERATIONS
    plain = load_cluster("a100-80g-sxm:8*16")
    for of in measured():
        yield from _fitted_rows(of, iterations)
        every = fit(of, of.rows, iterations)
        yield _row(of, "fitted on all of it", errors(of.rows, _cluster(every)), note=_text(every))
        yield _row(
            of,
            f"as {NAME} has them",
            errors(of.rows, load_cluster(f"{NAME}:8*16")),
            note="its formula, not its table",
        )
        yield _row(
            of,
            "NCCL's constants, nothing fitted",
            errors(of.rows, _cluster({})),
            note=f"links of {plain.device.name}",
        )
        yield _row(
            of,
            "one ring at full bandwidth",
            errors(of.rows, plain),
            note=f"the model of {plain.device.name}",
        )
        yield _row(
            of,
            "table without every other size",
            _left_out(of.rows),
            note="lines on log-log paper between the others",
        )


def _fitted_rows(of: Measured, iterations: int) -> Iterator[Row]:
    every: list[float] = []
    halves = []
    for turn in (0, 1):
        judged = of.worlds[turn::2]
        found = fit(of, [r for r in of.rows if r.group not in judged], iterations)
        wrong = errors([r for r in of.rows if r.group in judged], _cluster(found))
        every += wrong
        note = (
            f"fitted on {', '.join(str(w) for w in of.worlds if w not in judged)}: {_text(found)}"
        )
        halves.append(_row(of, f"worlds of {', '.join(map(str, judged))}", wrong, note=note))
    yield _row(of, "worlds that were not fitted", every, GOAL, "both halves by turns")
    yield from halves


def _row(
    of: Measured, name: str, wrong: Sequence[float], goal: Goal | None = None, note: str = ""
) -> Row:
    percent = [100 * abs(e) for e in wrong]
    note = f"mean error from 1 MiB on, {len(percent)} all-reduces; {note}"
    return Row(
        "communication",
        f"{of.name}: {name}",
        fmean(percent),
        "%",
        min(percent),
        max(percent),
        goal,
        note,
    )


def _text(found: Constants) -> str:
    return ", ".join(f"{k} {v:.4g}" for k, v in found.items())


def _cluster(constants: Constants) -> Cluster:
    """Return a cluster as measured, with these constants of its links and none of its table.

    Where no links are given, they are those of the 80 GB device.
    """
    known = load_cluster("a100-80g-sxm:8*16")
    links = {k: v for k, v in constants.items() if k in ("intra_bandwidth", "inter_bandwidth")}
    others = {k: v for k, v in constants.items() if k not in links}
    return known.each_links(
        lambda of: replace(of, communication="nccl", nccl=replace(of.nccl, **others), **links)
    )


def errors(rows: Sequence[CommDuration], cluster: Cluster) -> list[float]:
    """Return predicted / measured - 1 by formula."""
    return [
        by_formula(cluster, "all_reduce", r.bytes, rank_group(cluster, range(r.group)))
        / r.duration.seconds
        - 1
        for r in rows
    ]


def fit(of: Measured, rows: Sequence[CommDuration], iterations: int) -> Constants:
    """Return the constants with the least mean |log(predicted / measured)|."""
    start = {k: CONSTANTS[k] for k in of.fitted}

    def at(logs: Sequence[float]) -> Constants:
        return {k: v * math.exp(x) for (k, v), x in zip(start.items(), logs, strict=True)}

    best = minimum(
        lambda logs: fmean(abs(math.log1p(e)) for e in errors(rows, _cluster(at(logs)))),
        len(start),
        iterations,
    )
    return at(best)


def _left_out(rows: Sequence[CommDuration]) -> list[float]:
    """Return the errors at every second size of each world, from a table of the others."""
    worlds = {
        r.group: sorted((x for x in rows if x.group == r.group), key=lambda x: x.bytes)
        for r in rows
    }
    table = Costs(comm=tuple(r for found in worlds.values() for r in found[::2]))
    asked = [r for found in worlds.values() for r in found[1::2]]
    known = [table.of_comm(r.op, r.bytes, r.group, r.nodes) for r in asked]
    return [
        k.seconds / r.duration.seconds - 1
        for r, k in zip(asked, known, strict=True)
        if k is not None
    ]


def minimum(
    of: Callable[[Sequence[float]], float], n: int, iterations: int, size: float = 0.2
) -> list[float]:
    """Minimise by Nelder and Mead's simplex in n dimensions, from the origin and a step of `size` along each."""
    corners = [[size * (i == k) for i in range(n)] for k in range(-1, n)]
    simplex = sorted((of(x), x) for x in corners)
    for _ in range(iterations):
        (least, _), (most, worst) = simplex[0], simplex[-1]
        center = [fmean(x[i] for _, x in simplex[:-1]) for i in range(n)]

        def along(
            t: float, c: list[float] = center, w: list[float] = worst
        ) -> tuple[float, list[float]]:
            x = [a + t * (a - b) for a, b in zip(c, w, strict=True)]
            return of(x), x

        new = along(1.0)
        if new[0] < least:
            new = min(new, along(2.0))
        elif new[0] >= simplex[-2][0]:
            new = along(-0.5)
        if new[0] < most:
            simplex[-1] = new
        else:
            first = simplex[0][1]
            nearer = [[(a + b) / 2 for a, b in zip(first, x, strict=True)] for _, x in simplex[1:]]
            simplex[1:] = [(of(x), x) for x in nearer]
        simplex.sort()
    return simplex[0][1]
