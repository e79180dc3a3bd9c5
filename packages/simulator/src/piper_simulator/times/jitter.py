"""Say how a step is spread when durations vary from one time to the next.

Law: each time that it runs, an instruction of the compute stream, or a message, takes its duration times an independent
number, lognormal with mean 1 and the given coefficient of variation c: exp(N(-s^2 / 2, s^2)) with s^2 = ln(1 + c^2).
Healthy clusters show steps whose c is 0.05 to 0.5 %: 0.05 % between repeated runs of one configuration on 512 GPUs
(vTrain, https://github.com/VIA-Research/vTrain), 0.19 % over the steps of NVIDIA's DGX Cloud benchmarks on 256 GPUs,
0.5 % on two L4 (Mist, arXiv 2503.19050).

Every rank draws for itself, even if a role stands for many. A collective waits for the latest of its members, which is
why more replicas make a step longer. So ranks are timed apart, by the sweep of `piper_ir.fold.timing`: twice per
repetition, once for a step alone and once for the next of steps that follow each other. Of very many ranks only some
replicas are timed (`MOST`), and a note says so: the latest of few is earlier than the latest of all.

Durations vary around the durations in the step alone, with contention if there is any: which messages share links does
not change with them. Launches of an instruction's kernels vary with its duration, the host's own time for it does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from random import Random
from typing import Any

from piper_ir.fold.issue import issue_times
from piper_ir.fold.timing import Prepared, Times, prepare, sweep
from piper_ir.ground.errors import PlanError
from piper_ir.ground.limits import most
from piper_ir.plan.plan import Plan
from piper_simulator.durations.instances import instances
from piper_simulator.times.splitting import SplitPlan, each_rank
from piper_simulator.times.timed import PlanWork

MOST = 2_000_000
"""The most instructions that are timed in all repetitions, which takes some seconds; at least two replicas are."""
MOST_REPETITIONS, FEW_REPETITIONS = 100_000, 200
"""The most repetitions, beyond which a percentile gains nothing, and the fewest that are timed of any plan."""
MOST_JITTER = 10.0
"""The largest jitter that is accepted: durations vary by less than 1 % on a healthy machine."""
WARM_UP = 3
"""The number of steps before the ones whose seconds count as steady state."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Hold percentiles 5, 50 and 95, mean and standard deviation of seconds.

    The standard deviation is the sample's, and 0 for a single value.
    """

    p5: float
    median: float
    p95: float
    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class Distribution:
    """Hold how a step is spread.

    Attributes:
        step_s: seconds of a step from a common start, over repetitions.
        period_s: seconds between the ends of steps that follow each other.
        jitter: the coefficient of variation.
        repetitions: how many.
        ranks: the ranks that drew for themselves.
        world: all ranks.
        note: a remark if not all ranks drew, else empty.
    """

    step_s: Percentiles
    period_s: Percentiles
    jitter: float
    repetitions: int
    seed: int
    ranks: int
    world: int
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers, for programs."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TimedPlan:
    """Hold the plan of `parts` and its work; `durations` per node, in seconds, vary, and nothing else does."""

    plan: Plan
    parts: SplitPlan
    taken: PlanWork
    durations: Sequence[float]


def distribution(
    held: TimedPlan, jitter: float, *, seed: int = 0, repetitions: int = 200
) -> Distribution:
    """Return how the step is spread over random durations; equal arguments give equal numbers.

    Raises PlanError for a jitter or repetitions out of range.
    """
    if (
        isinstance(jitter, bool)
        or not isinstance(jitter, int | float)
        or not 0 <= jitter <= MOST_JITTER
    ):
        raise PlanError(
            f"jitter is {jitter!r}; a coefficient of variation from 0 to {MOST_JITTER:g} is needed, e.g. 0.05"
        )
    if type(repetitions) is not int or not 1 <= repetitions <= MOST_REPETITIONS:
        raise PlanError(
            f"repetitions is {repetitions!r}; a whole number from 1 to {MOST_REPETITIONS} is needed"
        )
    plan, world = held.plan, held.plan.mesh.world
    left_out = _left_out(held, repetitions)
    _check_length(held, left_out, repetitions)
    apart = each_rank(plan, left_out).plan
    prepared = prepare(apart)
    taken, hosted = held.taken, [work.launch_s for work in held.taken.work]
    durations, launches = (_of_ranks(held, apart, each) for each in (held.durations, hosted))
    varied = _varied(prepared, durations, jitter, Random(seed))
    alone, ends = [], []
    times: Times | None = None

    def step(after: Times | None) -> Times:
        seconds = next(varied)
        hosted = [
            launch * now / mean if mean else launch
            for launch, now, mean in zip(launches, seconds, durations, strict=True)
        ]
        issue = issue_times(prepared.offsets, taken.issue_s, hosted, seconds)
        return sweep(prepared, seconds, latency=taken.latency, issue=issue, after=after)

    for k in range(repetitions + WARM_UP):
        if k < repetitions:
            alone.append(step(None).makespan)
        times = step(times)
        ends.append(times.makespan)
    between = [b - a for a, b in zip(ends[WARM_UP - 1 :], ends[WARM_UP:])]
    ranks = world - len(left_out)
    return Distribution(
        _percentiles(alone),
        _percentiles(between),
        jitter,
        repetitions,
        seed,
        ranks,
        world,
        _note(ranks, world, plan.replicas),
    )


def _of_ranks(held: TimedPlan, apart: Plan, by_node: Sequence[float]) -> list[float]:
    """Return numbers per node of the plan of parts as numbers per node of one with a role for each rank."""
    offsets, found = held.taken.prepared.offsets, list[float]()
    for role in apart.roles:
        r = held.parts.role_of[role.ranks[0]]
        found += by_node[offsets[r] : offsets[r + 1]]
    return found


def _check_length(held: TimedPlan, left_out: frozenset[int], repetitions: int) -> None:
    """Raise PlanError for repetitions that would take many minutes, although few replicas are timed."""
    each = 2 * sum(
        len(role.program) * sum(rank not in left_out for rank in role.ranks)
        for role in held.plan.roles
    )
    accepted = max(FEW_REPETITIONS, most(100 * MOST, each))
    if repetitions > accepted:
        raise PlanError(
            f"repetitions is {repetitions}; at most {accepted} are accepted of a plan that times "
            f"{each} instructions"
        )


def _varied(
    prepared: Prepared, durations: Sequence[float], jitter: float, random: Random
) -> Iterator[list[float]]:
    """Yield new random durations each time: for compute one per node, for a message one for all its members."""
    variance = log(1 + jitter**2)
    mean, sigma, gauss = -variance / 2, variance**0.5, random.gauss
    first = {members[0] for members in prepared.groups}
    vary = (
        [(n, d) for n, d in enumerate(durations) if d and (prepared.group_of[n] < 0 or n in first)]
        if jitter
        else []
    )
    while True:
        varied = list(durations)
        for n, d in vary:
            varied[n] = d * exp(gauss(mean, sigma))
        yield varied


def _left_out(held: TimedPlan, repetitions: int) -> frozenset[int]:
    """Return the ranks of replicas that are not timed, so that at most `MOST` instructions are.

    At least two replicas stay, and one of each sort.
    """
    plan, role_of = held.plan, held.parts.role_of
    replicas: dict[int, list[int]] = {}
    for rank in range(plan.mesh.world):
        replicas.setdefault(plan.replica_of(rank), []).append(rank)
    total = sum(len(role.ranks) * len(role.program) for role in plan.roles)
    each = max(1, total * 2 * (repetitions + WARM_UP) // len(replicas))
    sorts: dict[tuple[int, ...], int] = {}
    for replica, ranks in replicas.items():
        sorts.setdefault(tuple([role_of[rank] for rank in ranks]), replica)
    order = [
        *sorts.values(),
        *(replica for replica in replicas if replica not in set(sorts.values())),
    ]
    left_out = frozenset(
        rank for replica in order[max(2, len(sorts), MOST // each) :] for rank in replicas[replica]
    )
    return left_out if all(_whole(plan, left_out)) else frozenset()


def _whole(plan: Plan, left_out: frozenset[int]) -> Iterator[bool]:
    """Yield whether each transfer keeps both ends or loses both."""
    for channel in plan.channels:
        if channel.kind == "p2p":
            yield all((a in left_out) == (b in left_out) for a, b in instances(plan, channel))


def _percentiles(seconds: Sequence[float]) -> Percentiles:
    ordered, n = sorted(seconds), len(seconds)
    low, median, high = (ordered[int(q * (n - 1) + 0.5)] for q in (0.05, 0.5, 0.95))
    mean = sum(ordered) / n
    std = (sum((x - mean) ** 2 for x in ordered) / (n - 1)) ** 0.5 if n > 1 else 0.0
    return Percentiles(low, median, high, mean, std)


def _note(ranks: int, world: int, replicas: int) -> str:
    if ranks == world:
        return ""
    drawn = ranks * replicas // world
    return (
        f"{drawn} of {replicas} replicas drew durations: the latest of all would come later than "
        f"the latest of these"
    )
