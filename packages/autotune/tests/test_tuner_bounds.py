"""The bounds of strategies that share states, against whole plans: none is above what its plan has, and some are
close."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

import pytest

from packages.autotune.tests.test_tuner_rules import filled, least_s, states, untimed
from packages.autotune.tests.tuner_spaces import problem
from packages.compiler.tests.compile_cases import SCHEDULES, RandomProgram, random_case
from piper_autotune.scoring.scoring import Scored, score
from piper_autotune.space.pipeline_bound import MicrobatchPaths
from piper_autotune.space.problem import Programs, TuningProblem, Wanted
from piper_autotune.space.rules import PruningRules
from piper_autotune.space.sketch import Sketches
from piper_autotune.space.whole_buckets import WholeBuckets
from piper_compiler import Strategy, Training, directives, recipes
from piper_ir.ground.mesh import Mesh
from piper_simulator import load_cluster
from tests.helpers.cases import each_case

CASES = 60
CLUSTER = load_cluster("h100x8*4")
_LINKS = [
    replace(links, intra_bandwidth=2e6, inter_bandwidth=2e6) for links in CLUSTER.network.links
]
SLOW = replace(CLUSTER, network=replace(CLUSTER.network, links=tuple(_LINKS)))
"""The same with slow links, so that messages decide in some plans."""


@dataclass(frozen=True)
class Candidate:
    """A strategy with its problem, and what its plan has."""

    of: TuningProblem
    strategy: Strategy
    exact: Scored
    text: str


@dataclass(frozen=True)
class Least:
    """The bounds of a candidate: states, whole buckets beside them, the fullest moment, and seconds."""

    states: int
    buckets: int
    filled: int
    period_s: float


def sharing(rng: Random) -> dict[str, Any]:
    return dict(
        zero=rng.randint(1, 3),
        bucket_mb=rng.choice((1e-5, 3e-4, 1e-3, 25)),
        resident_mb=rng.choice((0, 0, 0.0005, "step")),
        reduced_mb=rng.choice((0, 0, 0.0005, "step")),
        prefetch=rng.randint(0, 3),
        **rng.choice(({}, dict(gather="dp", reduce="dp"))),
    )


def _random_candidate(seed: int) -> tuple[TuningProblem, Strategy, str]:
    """Any placement and order; the drawn strategies along dp get shares, those without replicas get two."""
    rng, case = Random(seed), random_case(seed)
    chosen, dp = sharing(rng), max(2, case.strategy.mesh.size("dp"))
    pipeline = [d for d in case.strategy.directives if not isinstance(d, directives.replicate)]
    made = Strategy(
        Mesh(pp=case.strategy.mesh.size("pp"), dp=dp), (*pipeline, *recipes.data_parallel(**chosen))
    )
    batch = case.global_batch // case.strategy.mesh.size("dp") * dp
    training = replace(case.training, state_bytes=lambda bucket: 8 * bucket.numel + 4)
    program = untimed(case.program) if rng.random() < 0.8 else case.program
    of = TuningProblem(program, batch, training, rng.choice((CLUSTER, SLOW)))
    return of, made, f"{case.text}, {chosen}"


def _recipe_candidate(seed: int) -> tuple[TuningProblem, Strategy, str]:
    """Recipes, whose orders name everything."""
    rng = Random(seed)
    name = rng.choice(sorted(SCHEDULES))
    each, recipe = SCHEDULES[name]
    pp, m, dp, chosen = rng.choice((1, 2, 4)), rng.randint(1, 6), rng.choice((2, 4)), sharing(rng)
    program = untimed(RandomProgram(rng, pp * each, buffers=False).build())
    made = Strategy(
        Mesh(pp=pp, dp=dp), (*recipe(pp=pp, microbatches=m), *recipes.data_parallel(**chosen))
    )
    training = Training(state_bytes=lambda bucket: 8 * bucket.numel, clip=rng.choice((None, 1.0)))
    of = TuningProblem(program, rng.randint(1, 3) * m * dp, training, rng.choice((CLUSTER, SLOW)))
    return of, made, f"seed {seed}: {name}, pp={pp}, m={m}, dp={dp}, {chosen}"


@cache
def candidates() -> tuple[Candidate, ...]:
    """Every drawn strategy that compiles; pairs of given duration do not with gradients that are shared."""
    out = []
    for seed in range(CASES):
        of, strategy, text = (_random_candidate if seed % 2 else _recipe_candidate)(seed)
        assert of.global_batch is not None
        microbatches = next(
            d.microbatches for d in strategy.directives if isinstance(d, directives.split)
        )
        exact = score(
            of,
            strategy,
            {Wanted(of.global_batch // microbatches // strategy.mesh.size("dp")): None},
        )
        if isinstance(exact, Scored):
            out.append(Candidate(of, strategy, exact, text))
        else:
            assert "gradients or parameters are sharded" in str(exact), (text, exact)
    return tuple(out)


def bounds(item: Candidate) -> Least | None:
    found = Sketches(item.of, Programs(item.of, None))
    sketch = found.sketch(item.strategy)
    if sketch is None:
        return None
    rows = found.rows(sketch)
    assert rows is not None
    seconds = least_s(found, item.strategy, sketch, rows)
    whole = max(found.bucket_bytes(sketch).values())
    return Least(states(found, sketch), whole, filled(found, sketch, rows)[0], seconds)


@cache
def bounded() -> tuple[tuple[Candidate, Least], ...]:
    """Return the candidates that have bounds, with them."""
    return tuple((item, least) for item in candidates() if (least := bounds(item)))


def above(item: Candidate, least: Least) -> list[str]:
    """The bounds that are above what the plan has."""
    held = item.exact.peak_bytes
    wrong = [name for name in ("states", "buckets", "filled") if getattr(least, name) > held]
    return wrong + (["period_s"] if least.period_s > item.exact.period_s * (1 + 1e-9) else [])


def test_no_bound_is_above_the_plan_and_some_are_close() -> None:
    close: Counter[str] = Counter()
    for item, least in bounded():
        assert not above(item, least), item.text
        assert least.states <= least.buckets
        close["bounded"] += 1
        close["memory"] += max(least.buckets, least.filled) > 0.85 * item.exact.peak_bytes
        close["seconds"] += least.period_s > 0.8 * item.exact.period_s
        close["buckets"] += least.buckets > least.states
        close["filled"] += least.filled > least.buckets
    assert close["bounded"] > 0.9 * CASES
    assert all(close[name] > 0.1 * CASES for name in ("memory", "seconds", "buckets", "filled")), (
        close
    )


@each_case("name", ["states", "buckets", "filled", "period_s"])
def test_negative_control_bounds_half_as_large_again_are_seen(name: str) -> None:
    wrong = sum(
        name in above(item, replace(least, **{name: 1.5 * getattr(least, name)}))
        for item, least in bounded()
    )
    assert wrong > 5


FAULTS: dict[str, Callable[[WholeBuckets, Any], Any]] = {
    "every bucket of the role is whole at once": lambda w, use: (
        sum(w.gathered.values()) + sum(w.reduced.values())
    ),
    "buckets are half as large again": lambda w, use: 1.5 * _bytes_in(w, use),
}
_bytes_in = WholeBuckets.bytes_in


@pytest.mark.parametrize("fault", FAULTS)
def test_negative_control_buckets_that_are_counted_too_often_are_seen(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WholeBuckets, "bytes_in", FAULTS[fault])
    found = [
        name for item in candidates() if (least := bounds(item)) for name in above(item, least)
    ]
    assert {"buckets", "filled"} <= set(found)


def test_negative_control_a_message_too_many_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = WholeBuckets.messages
    monkeypatch.setattr(
        WholeBuckets,
        "messages",
        lambda self, role: Counter({m: n + 1 for m, n in messages(self, role).items()}),
    )
    assert any("period_s" in above(item, least) for item in candidates() if (least := bounds(item)))


@cache
def pipelines() -> tuple[tuple[Strategy, float], ...]:
    """Return strategies of eight layers in a row on two to four devices, with the seconds per step of their plans."""
    recipe = {
        name: SCHEDULES[name][1] for name in ("gpipe", "one_f_one_b", "interleaved", "zb_h1", "zbv")
    }
    made = [
        Strategy(Mesh(pp=pp), make(pp=pp, microbatches=m))
        for make in recipe.values()
        for pp, m in ((2, 2), (2, 6), (4, 4), (4, 8))
    ]
    exact = [score(problem(), strategy, {Wanted(1): None}) for strategy in made]
    return tuple((s, e.period_s) for s, e in zip(made, exact) if isinstance(e, Scored))


def pipeline_bounds() -> list[float]:
    sketches = Sketches(problem(), Programs(problem(), None))
    made = [(strategy, sketches.sketch(strategy)) for strategy, _ in pipelines()]
    return [least_s(sketches, strategy, sketch, 1) for strategy, sketch in made if sketch]


def test_a_pipeline_fills_and_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = [period_s for _, period_s in pipelines()]
    bound = pipeline_bounds()
    assert len(exact) == len(bound) == 20
    assert all(b <= e * (1 + 1e-9) for b, e in zip(bound, exact))
    monkeypatch.setattr(MicrobatchPaths, "seconds", lambda self, took, m: 0.0)
    assert sum(b > 1.05 * w for b, w in zip(bound, pipeline_bounds())) > 10, "of compute alone"


def test_negative_control_a_microbatch_too_many_in_a_pipeline_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = MicrobatchPaths.seconds
    monkeypatch.setattr(
        MicrobatchPaths, "seconds", lambda self, took, m: seconds(self, took, m + 1)
    )
    assert any(b > e * (1 + 1e-9) for b, (_, e) in zip(pipeline_bounds(), pipelines()))


def test_what_is_pruned_does_not_fit_or_is_slower() -> None:
    seen: set[str] = set()
    for item in candidates()[::3]:
        held, period_s = item.exact.device_bytes, item.exact.period_s
        known = (found.period_s if (found := bounds(item)) else period_s) * (1 - 1e-6)
        for limit, known_s in ((held - 1, float("inf")), (held, period_s), (None, known)):
            of = replace(item.of, memory_limit=limit)
            pruned = PruningRules(of, Programs(of, None)).check(item.strategy, known_s)
            if pruned is not None:
                assert limit != held, (pruned, item.text)
                seen.add(pruned.rule)
        for least in _on_devices(item):
            pruned = PruningRules(
                of := replace(item.of, memory_limit=least - 1), Programs(of, None)
            ).check(item.strategy)
            assert (
                pruned is not None
                and pruned.device_bytes is not None
                and least <= pruned.device_bytes <= held
            )
            seen.add(pruned.rule)
    assert seen >= {"buckets", "activations", "slower"}


def _on_devices(item: Candidate) -> list[int]:
    """The bounds of the fullest device: with whole buckets, and at the fullest moment."""
    found = Sketches(item.of, Programs(item.of, None))
    sketch = found.sketch(item.strategy)
    rows = None if sketch is None else found.rows(sketch)
    if sketch is None or rows is None:
        return []
    moments = {role: nbytes for role, (nbytes, _) in found.filled_bytes(sketch, rows).items()}
    return [
        max(found.on_device(sketch, n, r) for r, n in by.items())
        for by in (found.bucket_bytes(sketch), moments)
    ]
