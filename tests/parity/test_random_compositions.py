"""Random compositions with masked losses, dropout and auxiliary gradients train what one device trains."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

import piper
from piper_ir.ground.errors import PiperError
from tests.helpers import parity, random_jobs
from tests.helpers.random_jobs import Plan, case

QUICK, MANY, STEPS = 60, 300, 2
"""The numbers of random compositions of a few jobs (`make test`) and of any job (`make test-long`), and of steps."""

REFUSED: dict[str, tuple[str, Callable[[Plan], bool]]] = {
    "tokens of a row apart, for experts that devices share": (
        r"is a dropless mixture whose experts devices share over ep; it needs all tokens of a row "
        r"on each device",
        lambda plan: plan.ep > 1 and (plan.cp > 1 or plan.stream == "tokens"),
    ),
    "too few tokens for two axes, each with two blocks": (
        r"4 tokens cannot be shared by 2 devices along cp, with 2 more for each, in zigzag order",
        lambda plan: plan.cp > 1 and plan.stream == "tokens",
    ),
    "tokens apart beside shared experts, named by the two choices of a token": (
        r"2 tokens cannot be shared by 2 devices along cp in zigzag order",
        lambda plan: plan.cp > 1 and plan.ep > 1,
    ),
    "random numbers between sums that stand apart": (
        r"cut=True\): layer\d draws random numbers, in the order of the whole chunk",
        lambda plan: plan.cut and plan.of.dropout > 0,
    ),
}
"""The reasons for which a composition may be refused at compile: a part of the text, and which compositions."""


def refusal(plan: Plan, text: str) -> str:
    """Return the name of the reason that a text gives; empty for none that is known, or for another composition."""
    found = (
        name for name, (said, about) in REFUSED.items() if about(plan) and re.search(said, text)
    )
    return next(found, "")


def check(plan: Plan) -> None:
    """Compare two steps with plain PyTorch on the whole batch, or the reason of a refusal with those that are known."""
    job = random_jobs.job_of(plan.of, plan.loss)
    try:
        made = piper.compile(job, plan.strategy())
    except PiperError as error:
        if not refusal(plan, str(error)):
            raise AssertionError(f"{plan!r} is refused for no known reason: {error}") from error
        return
    run = piper.execute(made, steps=STEPS, launcher="inline", memory=False, gradients=True)
    counts = {"replicas": made.plan.replicas, "microbatches": made.plan.microbatches}
    parity.assert_parity(run, parity.reference(job, **counts, steps=STEPS), label=repr(plan))


@pytest.mark.parametrize("seed", range(QUICK))
def test_a_composition_trains_what_one_device_trains(seed: int) -> None:
    check(case(seed, quick=True))


def test_a_mixture_that_is_cut_where_its_tokens_are_sorted() -> None:
    """There chunks hold tokens of all rows, in the order of experts, which is no reason to refuse what was captured."""
    check(replace(case(117, quick=False), schedule="gpipe"))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(MANY))
def test_a_composition_of_any_model_and_loss(seed: int) -> None:
    check(case(seed, quick=False))


def test_the_compositions_have_everything_in_them() -> None:
    """A draw that leaves a schedule, an axis or a state out would not be noticed otherwise."""
    plans = [case(seed, quick=True) for seed in range(QUICK)]
    for name, wanted in {
        "schedule": set(random_jobs.BUILT_IN),
        "pp": {1, 2, 4},
        "dp": {1, 2},
        "ep": {1, 2},
        "tp": {1, 2},
        "cp": {1, 2},
        "zero": {0, 1, 2, 3},
        "stream": {"", "tokens"},
        "attention": {"heads", "ring", "gather"},
        "keep": {"all", "inputs", "products", "attention"},
        "of": {of for of, _ in random_jobs.QUICK},
    }.items():
        assert wanted <= {getattr(plan, name) for plan in plans}, name
