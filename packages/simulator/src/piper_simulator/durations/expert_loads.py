"""Find how uneven the tokens of experts are: the load of the fullest rank over the mean of all.

If each rank has some of the experts, the fullest of them decides how long dropless experts take, since the others wait
for it (`piper_simulator.durations.expert_work`). A load is a number, drawn from a distribution (`Zipf`), or the load of
a run, which logs the tokens of each expert in its metrics.jsonl.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import exp, isfinite, prod, sqrt
from os.path import isdir
from pathlib import Path
from random import Random
from typing import Any, Literal

from piper_ir.ground.errors import PlanError
from piper_ir.ground.expert_tokens import LOAD_NOT_MEASURED
from piper_ir.ground.sizes import bind
from piper_ir.plan.plan import Plan
from piper_ir.program.program import Chunk, Kernel
from piper_ir.tools import why_unread
from piper_simulator.durations.expert_work import EVEN, Loads, further_rounds

EXPERTS = "experts"
"""The coordinate of chunks that compute experts, and the key of their tokens in a step's metrics."""
METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class Zipf:
    """Draw loads of experts whose popularity falls with their rank: the k-th is chosen in proportion to k ** -s.

    In each draw the experts change places at random, and the tokens of each scatter as independent choices do. Every
    token goes to different experts. The same seed gives the same loads.

    Attributes:
        s: the exponent; 0 is a uniform router.
        draws: how many loads are drawn; a prediction uses their mean, and says the worst.
        seed: of the draws.
    """

    s: float
    draws: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        if (
            isinstance(self.s, bool)
            or not isinstance(self.s, int | float)
            or not (isfinite(self.s) and self.s >= 0)
        ):
            raise PlanError(f"Zipf({self.s!r}): a number from 0 on is needed, such as 0.3")
        for name, value, least in (("draws", self.draws, 1), ("seed", self.seed, 0)):
            if type(value) is not int or value < least:
                raise PlanError(f"Zipf({name}={value!r}): an integer from {least} on is needed")


GivenLoad = float | Zipf | str | Path


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Hold the tokens of the fullest rank's experts over the mean of all ranks.

    Attributes:
        mean: over draws, or over layers and steps of a run.
        worst: of all draws, or of all steps of a run.
        source: "assumed" if nobody gave it, "given", "drawn" or "measured".
        text: the same in words.
        loads: all of them with their shares, rounded to 0.01; a prediction is the mean over the predictions under each.
    """

    mean: float
    worst: float
    source: Literal["assumed", "given", "drawn", "measured"]
    text: str
    loads: Loads = EVEN

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"mean": self.mean, "worst": self.worst, "source": self.source, "text": self.text}


@dataclass(frozen=True, slots=True)
class Mixture:
    """Describe the experts of a plan.

    Attributes:
        experts: how many a layer has.
        ranks: how many ranks share them; 1 if each has all.
        choices: tokens times experts per token, of one microbatch of all these ranks; places that no token took are
            among them.
        tokens: the tokens of such a microbatch; 0 if the plan does not say.
        padded: whether every expert computes as many places, whatever tokens it has.
        bound: the places for rows of a dropless mixture whose experts ranks share, over the mean; None for any other.
        rounds: whether its rows above the bound go in further rounds.
    """

    experts: int
    ranks: int
    choices: int
    tokens: int
    padded: bool
    bound: float | None = None
    rounds: bool = False

    @property
    def each(self) -> int:
        """Return the different experts that a token chooses; 1 if the plan does not say."""
        return max(1, min(self.experts, self.choices // (self.tokens or self.choices)))

    @property
    def most(self) -> float:
        """Return the largest load: of the `each` experts of a token the fullest rank has as many as it can."""
        if self.ranks == 1:
            return self.experts
        return self.ranks * min(self.each, self.experts // self.ranks) / self.each


def of_experts(chunk: Chunk) -> bool:
    """Return whether a chunk computes experts."""
    return EXPERTS in chunk.coords


def tokens_of(chunk: Chunk, tokens: int) -> int:
    """Return the tokens of a microbatch that a device sends to experts: fewer than all where devices share them."""
    if "F" not in chunk.steps or chunk.steps["F"].experts is None:
        return tokens
    outputs = [o.spec.shape for o in chunk.outputs if o.kind == "value" and len(o.spec.shape) > 1]
    return min([tokens, *(prod(bind(d, 0) for d in shape[:-1]) for shape in outputs)])


def devices_of(plan: Plan, chunk: Chunk) -> int:
    """Return the devices whose tokens a chunk's experts compute: all that share experts, or cut each one.

    Devices that cut an expert gather the rows of all of them for their part of its hidden elements.
    """
    axes = set(plan.mesh.along(chunk.experts))
    if "F" in chunk.steps and chunk.steps["F"].experts is not None:
        read = {i.ref for i in chunk.inputs if i.kind == "param"}
        weights = [p for p in plan.params if p.name in read and len(p.spec.shape) == 3]
        axes |= {part.axis for p in weights for part in p.layout}
    return plan.mesh.degree(tuple(axes))


def mixture_of(plan: Plan) -> Mixture | None:
    """Return the experts of a plan; None if it has none."""
    shared = [c for c in plan.chunks if of_experts(c)]
    for chunk in shared or plan.chunks:
        for kernel, experts in _of_weights(chunk):
            ranks = plan.mesh.degree(plan.mesh.along(chunk.experts))
            own = tokens_of(chunk, plan.rows * (plan.tokens_per_row or 0))
            tokens = devices_of(plan, chunk) * own
            if (region := chunk.steps["F"].experts) is not None:
                choices, rounds = ranks * bind(region.rows, 0), bool(region.round.kernels)
                return Mixture(experts * ranks, ranks, choices, tokens, False, region.bound, rounds)
            padded = len(kernel.dims) == 4
            choices = ranks * bind(kernel.dims[-3], 0) * (experts if padded else 1)
            return Mixture(experts * ranks, ranks, choices, tokens, padded)
    return None


def _of_weights(chunk: Chunk) -> Iterator[tuple[Kernel, int]]:
    """Yield the forward products of a chunk with the weights of experts, [E, K, N], and how many experts these have."""
    weights = {tuple(bind(d, 0) for d in i.spec.shape) for i in chunk.inputs if i.kind == "param"}
    weights = {w for w in weights if len(w) == 3}
    for kernel in chunk.steps["F"].cost.kernels if weights and "F" in chunk.steps else ():
        if kernel.kind != "matmul":
            continue
        n, k = (bind(d, 0) for d in kernel.dims[-2:])
        for w in weights:
            batched = len(kernel.dims) == 4 and bind(kernel.dims[0], 0) == w[0]
            if {n, k} == {*w[1:]} and (batched or kernel.rows_dim is not None):
                yield kernel, w[0]


def load_of(plan: Plan, load: GivenLoad | None) -> ExpertLoad | None:
    """Return the load of a plan's experts; None for a plan without experts.

    Raises PlanError for a load that cannot be, and for one of a plan without experts.
    """
    mixture = mixture_of(plan)
    if mixture is None:
        if load is not None:
            raise PlanError(f"load={_shown(load)}: this plan has no experts; leave the load out")
        return None
    if load is None:
        return ExpertLoad(1.0, 1.0, "assumed", "as if all ranks had equally many tokens")
    if isinstance(load, Zipf):
        loads = drawn(load, mixture)
        text = f"Zipf({load.s:g}), {load.draws} draws from seed {load.seed}"
        return ExpertLoad(sum(loads) / len(loads), max(loads), "drawn", text, _shares(loads))
    if isinstance(load, str | Path):
        return _measured(Path(load), mixture)
    if isinstance(load, bool) or not isinstance(load, int | float):
        raise PlanError(
            f"load={load!r}: a number, piper.Zipf(s), or the {METRICS} of a run is needed"
        )
    if not 1 <= load <= mixture.most:
        own = mixture.experts // mixture.ranks
        full = f"one of {mixture.most:g} has them all"
        if mixture.ranks > 1 and own < mixture.each:
            full = f"of {mixture.each} different experts of a token a rank has {own} at most"
        raise PlanError(
            f"load={load:g}: from 1 (all ranks have equally many tokens) to {mixture.most:g} ({full}) is accepted"
        )
    if mixture.ranks == 1:
        return ExpertLoad(
            1.0, 1.0, "given", f"{load:g}, as given, is one expert's; every device has all experts"
        )
    return ExpertLoad(
        float(load),
        float(load),
        "given",
        f"{load:g} times the mean, as given",
        ((float(load), 1.0),),
    )


def _shares(loads: Sequence[float]) -> Loads:
    """Return loads, rounded, each with its share."""
    return tuple(
        (load, count / len(loads))
        for load, count in sorted(Counter(max(1.0, round(x, 2)) for x in loads).items())
    )


def load_text(load: GivenLoad) -> str:
    """Return a text that is equal, in any process, only for loads that are alike; of a run that of its log.

    Raises PlanError if this cannot be read.
    """
    if not isinstance(load, str | Path):
        return repr(load)
    path = Path(load)
    digest = sha256()
    for line in _lines(path, path / METRICS if isdir(path) else path):
        digest.update(line.encode())
    return digest.hexdigest()


def _shown(load: GivenLoad) -> str:
    return repr(str(load)) if isinstance(load, str | Path) else repr(load)


def drawn(zipf: Zipf, mixture: Mixture) -> list[float]:
    """Return the load of the fullest rank over the mean, of each draw."""
    if mixture.ranks == 1:
        return [1.0] * zipf.draws
    tokens = mixture.tokens or mixture.choices
    parts = _chosen([(k + 1) ** -zipf.s for k in range(mixture.experts)], mixture.each)
    chance, fullest = Random(zipf.seed), []
    for _ in range(zipf.draws):
        chance.shuffle(parts)
        loads = [
            max(0.0, tokens * p + chance.gauss(0, 1) * sqrt(tokens * p * (1 - p))) for p in parts
        ]
        fullest.append(min(_fullest(loads, mixture.ranks), mixture.most))
    return fullest


def _chosen(weights: Sequence[float], each: int) -> list[float]:
    """Return the part of tokens that choose each expert, when they choose `each` different ones by these weights.

    An expert is among the first to come, each coming at a rate of its weight, with 1 - exp(-weight x time); the time is
    the one at which so many have come on average.
    """
    if each >= len(weights):
        return [1.0] * len(weights)
    low, high = 0.0, 1.0
    while sum(1 - exp(-w * high) for w in weights) < each:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if sum(1 - exp(-w * middle) for w in weights) < each else (low, middle)
        )
    return [1 - exp(-w * high) for w in weights]


def _fullest(tokens: Sequence[float], ranks: int) -> float:
    """Return the tokens of the fullest rank over the mean, if each has as many experts, in their order."""
    size, total = len(tokens) // ranks, sum(tokens)
    return (
        max(sum(tokens[r * size : (r + 1) * size]) for r in range(ranks)) * ranks / total
        if total
        else 1.0
    )


def _measured(path: Path, mixture: Mixture) -> ExpertLoad:
    """Return the load of a run, from its folder or its metrics."""
    file = path / METRICS if isdir(path) else path
    steps = [_of_step(file, k, line, mixture) for k, line in enumerate(_lines(path, file), 1)]
    steps = [loads for loads in steps if loads]
    if not steps:
        raise _no_load(
            file, "no line has tokens of experts: it is of a model without experts, or of no run"
        )
    by_step = [sum(loads) / len(loads) for loads in steps]
    text = f"{file}, {len(steps)} steps of {len(steps[0])} layers"
    shares = _shares([load for loads in steps for load in loads])
    return ExpertLoad(sum(by_step) / len(by_step), max(by_step), "measured", text, shares)


def _no_load(path: Path, problem: str) -> PlanError:
    return PlanError(
        f"load={str(path)!r}: {problem}; the {METRICS} of a run of this model, or the run's folder, is accepted"
    )


def _lines(path: Path, file: Path) -> Iterator[str]:
    """Yield the lines of a file, which is `path` or in that folder, one at a time: a long run has a large file.

    A last line without its end is left out: a run that was killed wrote it.
    """
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if line.endswith("\n") or not number:
                    yield line
        return
    except FileNotFoundError:
        problem = (
            "there is no such file or folder" if file is path else f"this folder has no {METRICS}"
        )
    except (OSError, ValueError) as e:
        problem = why_unread(e)
    raise _no_load(path, problem)


def _of_step(file: Path, number: int, line: str, mixture: Mixture) -> list[float]:
    """Return the load of each layer in a line of metrics; none if it has no experts."""
    try:
        metrics = json.loads(line)
    except (ValueError, RecursionError):
        raise _no_load(
            file, f"line {number} is no line of a run's metrics: it is no JSON"
        ) from None
    by_layer = _tokens_by_layer(metrics)
    if by_layer is None:
        raise _no_load(
            file,
            f"line {number} is no line of a run's metrics: it has no numbers of tokens by layer of experts",
        )
    for name, tokens in by_layer.items():
        if len(tokens) != mixture.experts:
            raise _no_load(
                file, f"{name} has {len(tokens)} experts, those of this plan are {mixture.experts}"
            )
    return [_fullest(tokens, mixture.ranks) for tokens in by_layer.values()]


def _tokens_by_layer(line: object) -> dict[str, list[float]] | None:
    """Return the tokens of the experts of each layer in a line of metrics; None if it is no such line."""
    layers = (line.get(EXPERTS) or {}) if isinstance(line, dict) else None
    if not isinstance(layers, dict):
        return None
    by_layer: dict[str, list[float]] = {}
    for name, of in layers.items():
        counts = of.get("tokens") if isinstance(of, dict) else None
        if not isinstance(counts, list) or not all(
            type(n) in (int, float) and 0 <= n < 2**63 for n in counts
        ):
            return None
        by_layer[name] = [float(n) for n in counts]
    return by_layer


def load_notes(plan: Plan, load: ExpertLoad | None) -> tuple[str, ...]:
    """Return the notes of a prediction about the load of experts.

    They say if the load is not measured, if rows of the fullest rank have no place, and if a plan was saved before
    plans said how many rows come to dropless experts.
    """
    mixture = mixture_of(plan) if load is not None else None
    if load is None or mixture is None:
        return ()
    if mixture.bound is None and mixture.ranks > 1 and not mixture.padded:
        return (
            "this plan does not say how many rows come to its dropless experts, as those of earlier versions: its "
            "times are of all their places, whatever the load; compile it again",
        )
    said = _above_places(mixture, load)
    if load.source == "measured":
        return said
    if mixture.bound is None:
        why = (
            "each computes all its places"
            if mixture.padded
            else "every device has all experts of its layers"
        )
        return (f"{LOAD_NOT_MEASURED}; {why}, so that no time depends on it",)
    return (f"{LOAD_NOT_MEASURED}: {load.text}; a run's {METRICS} has it (load=)", *said)


def _above_places(mixture: Mixture, load: ExpertLoad) -> tuple[str, ...]:
    """Return a note on how rows of the fullest rank without a place are treated; none if all have one."""
    bound = mixture.bound
    if bound is None or load.loads[-1][0] <= bound:
        return ()
    share = sum(share for times_mean, share in load.loads if times_mean > bound)
    often = "always" if share > 0.995 else f"in {100 * share:.0f} % of cases"
    above = (
        f"the load of the experts, {load.mean:.2f} on average, is {often} above their places, "
        f"{bound:.2f} times the mean"
    )
    if not mixture.rounds:
        return (
            f"{above}: times are of rows with a place; overflow='drop' leaves others out, 'error' ends the run",
        )
    most = further_rounds(load.loads[-1][0], bound)
    return (
        f"{above}: a layer then takes {'1 further round' if most == 1 else f'up to {most} further rounds'}",
    )
