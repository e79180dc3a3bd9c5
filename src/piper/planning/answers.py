"""Search a job's strategies on a cluster, and rank the best that differ in structure, with time, memory and cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any

from piper.api.captures.capturing import captured_once
from piper.api.compiling.compiling import Compiled, compile
from piper.api.problems.spaces import StrategySpace, space
from piper.api.problems.tuning_problem import Conditions
from piper.api.problems.variant_search import variant_search
from piper.api.problems.variants import PlanVariant, VariantChoices, said_by
from piper.planning.failures import failure
from piper.planning.goodput import Failures, Goodput, goodput, saved_bytes
from piper.views.strategy_facts import facts_of
from piper_autotune import NothingFoundError, SearchProgress, Study, tune
from piper_compiler import Options, Strategy, replicate, shard
from piper_ir.ground.errors import PiperError
from piper_ir.study.study import Row
from piper_ir.tools import size_text, working
from piper_report import memory_line
from piper_simulator import Cluster, Simulation, device_type, simulate

if TYPE_CHECKING:
    from piper_runtime import Job

SHOWN = 5
"""The most strategies of an answer."""
SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class TrainingBudget:
    """Say how long a training is, and the price of a device.

    Attributes:
        tokens: of the whole training; None if it is not asked for.
        price_per_hour: dollars per device; 0 for the cluster's own.
        failures: how often it fails; None if that is not asked for.
    """

    tokens: int | None = None
    price_per_hour: float = 0.0
    failures: Failures | None = None


@dataclass(frozen=True)
class PlannedStrategy:
    """Hold a strategy and its prediction; `piper plan --json` prints it `as_dict`.

    Attributes:
        strategy: the strategy.
        mesh: its axes and their sizes.
        schedule: stages, microbatches, shared states, recomputation.
        period_s: seconds per step.
        low_s: the lower end of the interval in which 80 % of published runs fall (`piper_simulator.interval`).
        high_s: its upper end; both are `period_s` where times are given.
        tokens_per_s_per_device: None if the tokens of a row are not known.
        mfu: model FLOPs over the peak; None if one is not known.
        device_bytes: of the fullest device.
        largest: the largest category of these, with its bytes.
        fits: whether all devices have the memory.
        compute_s: seconds of a step in which the busiest device computes.
        exposed_s: seconds in which a device waits for its own messages.
        waiting_s: seconds in which it waits for others (bubbles).
        goodput: the share of time that failures and checkpoints leave; None unless it is asked for.
        days: of the whole training, with the time lost to failures; None unless its tokens are known.
        dollars: likewise, if the devices have a price.
        own: whether it is the strategy of the user's file.
        checkpoint_every_s: the seconds between checkpoints that leave that share; None likewise.
        host_bytes: that the devices of the fullest node have in its memory; 0 if nothing waits there.
    """

    strategy: Strategy
    mesh: str
    schedule: str
    period_s: float
    low_s: float
    high_s: float
    tokens_per_s_per_device: float | None
    mfu: float | None
    device_bytes: int
    largest: str
    fits: bool
    compute_s: float
    exposed_s: float
    waiting_s: float
    goodput: float | None
    days: float | None
    dollars: float | None
    own: bool = False
    checkpoint_every_s: float | None = None
    host_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, with the strategy's parameters in its place."""
        fields = asdict(self)
        return {"params": dict(self.strategy.params)} | {
            name: value for name, value in fields.items() if name != "strategy"
        }


@dataclass(frozen=True)
class Answer:
    """Hold the ranked strategies of a job, best first; the own one of a file is last.

    Attributes:
        strategies: that fit and differ in structure.
        own: the strategy of the user's file, if it has one.
        study: the search.
        failure: why nothing fits, with the way out; "" if something fits.
        warnings: the assumptions of the predictions, each with its rows of the table unless it is about all rows.
        space: that was searched.
        best: the first strategy, compiled; None if nothing fits.
        simulation: that of the first strategy; None if nothing fits.
    """

    strategies: tuple[PlannedStrategy, ...]
    own: PlannedStrategy | None
    study: Study
    failure: str
    warnings: tuple[str, ...]
    space: StrategySpace
    best: Compiled | None
    simulation: Simulation | None


@captured_once()
def answer(
    job: Job,
    cluster: Cluster,
    budget: TrainingBudget,
    own: Strategy | None = None,
    options: Options | None = None,
    *,
    tried: Mapping[str, Any] | None = None,
    trials: int,
    seed: int = 0,
    workers: int = 1,
    progress: Callable[[SearchProgress], None] | None = None,
) -> Answer:
    """Search the strategies of a job, and return the best that differ in structure, each simulated with contention.

    If products of the own strategy are in pieces, the others' are, too. `options` belong to the own strategy, and
    `tried` are the kernels, precisions and CUDA graphs of the others, as in `piper.space`.
    """
    pieces = (
        max((d.pieces for d in own.directives if isinstance(d, shard)), default=1) if own else 1
    )
    more_pieces: dict[str, Any] = {"pieces": pieces} if pieces > 1 else {}
    why, searched = "", space(job, cluster, **{**more_pieces, **(tried or {})})
    predict = _Predictor(job, cluster, budget, searched.variants, options or Options())
    mine = None if own is None else predict.own(own)
    try:
        limit = max(kind.device.memory_bytes for kind in cluster.kinds)
        conditions = Conditions(cluster, memory_limit=limit)
        problem, more = variant_search(job, searched.variants, conditions)
        study = tune(
            problem,
            searched,
            trials=trials,
            seed=seed,
            workers=workers,
            progress=progress,
            rescore=False,  # those that are shown are simulated below
            **more,
        )
    except NothingFoundError as e:
        study = e.study
        why = failure(study.rows, cluster, job.global_batch, str(e), exhausted=study.exhausted)
    ranked: list[PlannedStrategy] = []
    try:
        with working("simulating the best with contention"):
            for one in contended(
                structures(study), lambda row: predict(study.strategies[row.number])
            ):
                ranked.append(one)
    except KeyboardInterrupt:
        study = replace(study, interrupted=True)
    fitting = sorted((one for one in ranked if one.fits), key=lambda one: one.period_s)[:SHOWN]
    best, simulation = predict.made[id(fitting[0].strategy)] if fitting else (None, None)
    warned = row_warnings(predict.warnings, [*fitting, *([mine] if mine is not None else [])])
    return Answer(tuple(fitting), mine, study, why, warned, searched, best, simulation)


def row_warnings(
    warned: Mapping[str, Sequence[Strategy]], shown: Sequence[PlannedStrategy]
) -> tuple[str, ...]:
    """Return the warnings of the strategies that are shown, with their rows; a warning without any is of the whole."""
    texts = []
    for text, strategies in warned.items():
        of = {id(strategy) for strategy in strategies}
        rows = [k for k, one in enumerate(shown, 1) if id(one.strategy) in of]
        names = ["yours" if shown[k - 1].own else str(k) for k in rows]
        if not of or len(rows) == len(shown):
            texts.append(text)
        elif rows:
            texts.append(f"row{'s' if len(rows) > 1 else ''} {', '.join(names)}: {text}")
    return tuple(texts)


def contended(
    rows: Iterable[Row], predict: Callable[[Row], PlannedStrategy]
) -> Iterator[PlannedStrategy]:
    """Yield the predictions of rows, the fastest without contention first, until no later one can be the best.

    Contention only takes time: a row whose period without it is above the best with it cannot be the best. At least
    `SHOWN` rows are predicted, and at most twice as many.
    """
    best = inf
    for count, row in enumerate(islice(rows, 2 * SHOWN)):
        if count >= SHOWN and (row.period_s or 0.0) >= best:
            return
        one = predict(row)
        if one.fits:
            best = min(best, one.period_s)
        yield one


def structures(study: Study) -> Iterator[Row]:
    """Yield the best row of each structure that fits: of a mesh, a schedule and states that ranks share."""
    seen: set[object] = set()
    for row in sorted(
        (r for r in study.rows if r.state == "complete" and r.number in study.strategies),
        key=lambda r: (r.period_s or 0.0, r.number),
    ):
        strategy = study.strategies[row.number]
        states = tuple(d.shards for d in strategy.directives if isinstance(d, replicate))
        structure = strategy.mesh, row.params.get("schedule"), states
        if structure in seen:
            continue
        seen.add(structure)
        yield row


class _Predictor:
    """Predict strategies of one job, and keep the warnings, the plans and their simulations."""

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        budget: TrainingBudget,
        variants: VariantChoices,
        options: Options,
    ) -> None:
        self._job, self._cluster, self._budget = job, cluster, budget
        self._variants, self._options = variants, options
        self.warnings: dict[str, list[Strategy]] = {}
        self.made: dict[int, tuple[Compiled, Simulation]] = {}

    def own(self, strategy: Strategy) -> PlannedStrategy | None:
        """Return the strategy of the user's file; None, with a warning, if it cannot be simulated here."""
        try:
            return self(strategy, own=True)
        except PiperError as e:
            self.warnings[f"the strategy of the file has no row: {e}"] = []
            return None

    def __call__(self, strategy: Strategy, *, own: bool = False) -> PlannedStrategy:
        variant = PlanVariant.of(strategy.params)
        plain = own and not said_by(strategy.params)
        job, how = variant.job(self._job), self._options if plain else variant.options
        compiled = compile(job, strategy, options=replace(how, device=device_type(self._cluster)))
        simulation = simulate(compiled.plan, self._cluster)
        self.made[id(strategy)] = compiled, simulation
        for note in simulation.notes:
            self.warnings.setdefault(note, []).append(strategy)
        rank = max(range(len(simulation.device_bytes)), key=simulation.device_bytes.__getitem__)
        owner, held = max(simulation.memory(rank).items(), key=lambda item: item[1])
        facts = facts_of(strategy, self._job.global_batch)
        period_s, interval = simulation.period_s, simulation.interval
        kept = self._kept(simulation, rank)
        days, dollars = self._takes(
            simulation, strategy.mesh.world, 1.0 if kept is None else kept.share
        )
        idle = simulation.global_bubble_s
        return PlannedStrategy(
            strategy,
            facts.mesh,
            _named(strategy, facts.schedule)
            + _rows_text(facts.rows)
            + ("" if own else variant.text(self._variants)),
            period_s,
            period_s if interval is None else interval.low,
            period_s if interval is None else interval.high,
            None
            if simulation.tokens_per_s is None
            else simulation.tokens_per_s / strategy.mesh.world,
            simulation.mfu,
            simulation.device_bytes[rank],
            f"{memory_line(owner)} {size_text(held)}",
            simulation.fits,
            simulation.step_s - idle,
            min(simulation.exposed_comm_s, idle),
            max(0.0, idle - simulation.exposed_comm_s),
            None if kept is None else kept.share,
            days,
            dollars,
            own,
            None if kept is None else kept.every_s,
            simulation.summary()["host_bytes"],
        )

    def _kept(self, simulation: Simulation, rank: int) -> Goodput | None:
        """Return the share of time that failures leave; None unless it is asked for."""
        if self._budget.failures is None:
            return None
        return goodput(self._budget.failures, saved_bytes(simulation.peak_by_category[rank]))

    def _takes(
        self, simulation: Simulation, world: int, kept: float
    ) -> tuple[float | None, float | None]:
        """Return the days and dollars of the whole training, as far as they are known."""
        if self._budget.tokens is None or not simulation.tokens_per_s or not kept:
            return None, None
        seconds = self._budget.tokens / simulation.tokens_per_s / kept
        ranks = range(min(world, self._cluster.devices))
        prices = [
            self._budget.price_per_hour or self._cluster.of(rank).price_per_hour for rank in ranks
        ]
        return seconds / SECONDS_PER_DAY, sum(prices) * seconds / 3600 if all(prices) else None


def _named(strategy: Strategy, words: str) -> str:
    """Return the words of a schedule behind the name that the search has for it, if devices are along pp."""
    name = strategy.params.get("schedule", "") if strategy.mesh.size("pp") > 1 else ""
    return f"{name}, {words}" if name else words


def _rows_text(rows: int | None) -> str:
    """Return the rows of a microbatch as the end of a schedule's words."""
    return "" if rows is None else f", {rows} row{'s' if rows > 1 else ''} per microbatch"
