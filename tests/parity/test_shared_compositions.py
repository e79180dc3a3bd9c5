"""Devices that share chunks under random strategies, against one device, and their memory to the byte."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

import piper
from piper_ir.verify import verify
from tests.helpers import compositions, parity
from tests.helpers.compositions import PIPELINES, Composition, fitted
from tests.predictions.test_memory_truth import lies

QUICK, LONG, PROCESSES = 200, 1200, 6
"""The cases that `make test` runs, those of the long suite with them, and those on processes."""
MODELS = (
    ("gpt", 2, "tokens"),
    ("llama", 2, ""),
    ("llama", 4, "tokens"),
    ("gpt_dropout", 2, ""),
    ("keywords", 2, "tokens"),
    ("frozen", 2, "tokens"),
)
"""Model, devices that share its chunks, and what they share of the stream: tied weights; groups of queries, and fewer
heads of keys than devices; dropout; a loss that is a sum over a sum of weights; frozen parameters. To capture and share
a model takes as long as many cases, so that the quick ones have few."""
MORE_MODELS = (
    *MODELS, ("gpt", 2, ""), ("gpt", 4, ""), ("gpt", 4, "tokens"), ("llama", 2, "tokens"), ("llama", 4, ""),
    ("gpt_dropout", 2, "tokens"), ("keywords", 2, ""), ("keywords", 4, "tokens"), ("frozen", 2, ""), ("frozen", 4, "tokens"),
    ("buffers", 2, ""), ("buffers", 2, "tokens"), ("deep", 2, ""), ("deep", 2, "tokens"), ("gpt_untied", 2, "tokens"),
    ("branches", 2, ""), ("slices", 2, ""), ("slices", 2, "tokens"), ("custom_op", 2, ""), ("skip", 2, ""), ("skip", 2, "tokens"),
    ("counter", 2, "tokens"), ("gpt_refilled", 2, "tokens"), ("in_place", 2, ""), ("llama", 1, ""),
)  # fmt: skip
SCHEDULES = ("default", "1f1b", "gpipe", "random", "random", *PIPELINES)
ROOMS = (0, 0.003, "step")
MOST_RANKS = 8
RINGS = 1, 2
"""Of the quick cases with the model of this number, every second one has two devices share the tokens as well, by a
ring."""
MEASURED = 3
"""Of the quick cases, every third trains for three steps and its memory is measured; the others train for two, with an
update between their gradients and one after them."""


def drawn(seed: int) -> Composition:
    """Draw a composition on at most eight devices. All pairs of models and schedules come in turn."""
    rng, plain = Random(seed), seed < QUICK
    models = MODELS if plain else MORE_MODELS
    model, tp, stream = models[seed % len(models)]
    schedule = SCHEDULES[seed // len(models) % len(SCHEDULES)]
    others = MOST_RANKS // tp
    pp, dp = rng.choice([(p, d) for p in (1, 2, 2, 4) for d in (1, 2, 2, 4) if p * d <= others])
    pp, dp = rng.choice(((1, 2), (2, 1), (2, 1), (2, 2))) if plain else (pp, dp)
    zero = rng.randrange(4) if dp > 1 and model != "buffers" else 0
    optimizer = rng.choice(("sgd", "adamw"))
    written = schedule == "random"
    policies = ("all", "all", "inputs") if plain else ("all", "all", "inputs", "products")
    policies = (
        ("all",) if model in ("buffers", "counter") else policies
    )  # R would read a buffer that has changed
    c = fitted(
        Composition(
            model, pp=pp, dp=dp, microbatches=rng.choice((2,) if plain else (2, 4)), schedule=schedule,
            placement=rng.choice(("recipe", "v", "shared", "random")) if written else "recipe",
            backward=rng.choice(("whole", "split", "mixed")) if written else "whole",
            overlap=written and rng.random() < 0.5, rows=2 if plain else rng.choice((1, 2)), optimizer=optimizer,
            clip=0.05 if optimizer == "adamw" else None, bucket_mb=rng.choice((0.002, 0.01, 25)), seed=seed,
            zero=zero, rep=2 if dp == 4 and zero and rng.random() < 0.5 else 1,
            resident_mb=rng.choice(ROOMS), reduced_mb=rng.choice(ROOMS), keep=rng.choice(policies),
            prefetch=rng.choice((0, 1, 2)), fuse=rng.random() < 0.8, tp=tp, stream=stream,
            gathered=bool(stream) and not plain and rng.random() < 0.5,
        )
    )  # fmt: skip
    if plain and seed % len(models) == RINGS[0] and seed // len(models) % RINGS[1] == 0:
        c = replace(c, cp=2, attention="ring")
    dp = min(
        c.dp, MOST_RANKS // (c.pp * c.tp * c.cp)
    )  # a schedule of stages takes two devices where one was drawn
    assert c.pp * dp * c.tp * c.cp <= MOST_RANKS
    return replace(c, dp=dp, rep=c.rep if dp == c.dp else 1, zero=c.zero if dp > 1 else 0)


CONTEXTS = 100
"""The cases with shared tokens of the long suite."""


def drawn_context(seed: int) -> Composition:
    """Draw a composition whose devices share tokens by a ring or gathered keys, some of them heads as well."""
    rng = Random(seed)
    c = drawn(len(MODELS) * (seed // 3) + (0, 1, 3)[seed % 3])
    tp, cp = rng.choice(((1, 2), (2, 2), (1, 4)))
    stream = rng.choice(("", "tokens")) if tp > 1 and cp == 2 else ""
    pp = min(c.pp, MOST_RANKS // (tp * cp))
    dp = min(c.dp, MOST_RANKS // (tp * cp * pp))
    return replace(
        c, tp=tp, cp=cp, pp=pp, dp=dp, zero=c.zero if dp > 1 else 0, rep=1, stream=stream, gathered=False,
        attention=rng.choice(("ring", "gather")), order=rng.choice(("", "zigzag", "blocks")),
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("seed", range(CONTEXTS))
def test_sharers_of_tokens_train_what_one_device_trains(seed: int) -> None:
    judge(drawn_context(seed))


def judge(c: Composition, whole: bool = True, **options: Any) -> None:
    """Compile, verify, run for three steps with its memory measured in the second, or else for two steps, and
    compare."""
    made = compositions.compiled(c)
    plan, steps = made.plan, parity.STEPS if whole else 2
    verify(plan)
    assert plan.shared or c.tp == c.cp == 1
    run = piper.execute(
        made,
        **{"steps": steps, "launcher": "inline", "gradients": True, "memory": whole, **options},
    )
    parity.assert_parity(run, compositions.expected(c, steps), label=repr(c))
    found = lies(plan, dict(run.memory))
    assert not found, "\n".join([repr(c), *found[:6]])


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=[pytest.mark.long] * (s >= QUICK)) for s in range(LONG)]
)
def test_sharers_train_what_one_device_trains(seed: int) -> None:
    judge(drawn(seed), whole=seed >= QUICK or seed % MEASURED == 0)


@pytest.mark.parametrize("seed", range(PROCESSES))
def test_sharers_in_processes_train_what_one_device_trains(seed: int, pool: Any) -> None:
    c = drawn(seed + len(MODELS) * (2 * seed + 1))
    judge(
        replace(c, pp=min(c.pp, 2), dp=1 if c.pp > 1 else min(c.dp, 2), rep=1, tp=2),
        launcher="processes",
        pool=pool,
    )


def test_the_cases_have_every_schedule_with_every_model() -> None:
    """What is drawn changes with the tables above; this says what they promise."""
    cases = [drawn(seed) for seed in range(QUICK)]
    assert {(c.model, c.tp, c.stream) for c in cases} == set(MODELS)
    assert {c.zero for c in cases} == {0, 1, 2, 3} and {c.keep for c in cases} == {"all", "inputs"}
    assert {c.schedule for c in cases} == set(SCHEDULES)
    rings = [c for c in cases if c.cp == 2]
    assert len(rings) >= 15 and {c.pp for c in rings} >= {1, 2} and {c.dp for c in rings} == {1, 2}
