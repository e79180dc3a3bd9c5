"""Protect that every composition of model, mesh, schedule and directives trains what one device trains on the whole
batch in plain PyTorch, in the memory that its plan says, under every launcher.

The cases are a pairwise cover of all factors (tests/helpers/composition_cover.py), and random ones of more factors.
`make test` runs some of the cover, in which every value is and seven of ten pairs meet, and 60 random ones of few
captures. `make test-long` runs all, and 1,000 of any.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults import runtime_faults as faults
from tests.helpers import composition_cover as covers
from tests.helpers import compositions, drawn_compositions, parity
from tests.helpers.compositions import Composition, fitted, has_stages
from tests.helpers.cover import met
from tests.helpers.judged import judge
from tests.helpers.written_out import blocks_of

LONG = 1000
BESIDE: dict[str, set[Any]] = dict(
    tiles={2}, waits={"all", "saved", "inputs"}, scaled={True}, hosted={"optim", "states"}, over_cp={True},
    hidden={"tp", "cp", "etp"}, folded={"tp", "cp"}, beside={True}, sized={True}, apart={True}, group={2},
    messages={"gather", "reduce", "send"},
)  # fmt: skip
"""Values of fields that random compositions have beside their factors."""


def judged(c: Composition, launcher: str, request: pytest.FixtureRequest) -> None:
    """Judge a composition under its launcher."""
    if c.model not in ("sequential", *covers.ANY):
        assert fitted(c) == c, "the factors met in another composition than the cover says"
    if launcher == "processes":
        judge(c, launcher="processes", pool=request.getfixturevalue("pool"))
    else:
        judge(c)


@pytest.mark.parametrize(
    ("c", "launcher"),
    [
        pytest.param(
            *case,
            id=f"{case[0]}-{case[1]}-{k}",
            marks=[pytest.mark.long] * (k not in covers.quick()),
        )
        for k, case in enumerate(covers.cover())
    ],
)
def test_a_composition_trains_what_one_device_trains(
    c: Composition, launcher: str, request: pytest.FixtureRequest
) -> None:
    judged(c, launcher, request)


@pytest.mark.parametrize("seed", drawn_compositions.QUICK)
def test_a_random_composition_of_few_captures_trains_what_one_device_trains(
    seed: int, request: pytest.FixtureRequest
) -> None:
    judged(*drawn_compositions.drawn(seed, quick=True), request)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(LONG))
def test_any_composition_trains_what_one_device_trains(
    seed: int, request: pytest.FixtureRequest
) -> None:
    judged(*drawn_compositions.drawn(seed), request)


def test_the_cover_has_every_two_values_that_may_meet() -> None:
    """Pairs that three factors together exclude are given up; they are few."""
    rows = covers.rows()
    together = {pair for row in rows for pair in met(covers.QUICK, row)}
    missing = [pair for pair in covers.QUICK.pairs() if pair not in together]
    assert len(missing) < 0.02 * len(covers.QUICK.pairs()), missing
    without_the_last = {pair for row in rows[:-1] for pair in met(covers.QUICK, row)}
    assert together - without_the_last, "each row was added for a pair that no row before has"


def test_the_quick_rows_have_every_value_and_seven_of_ten_pairs() -> None:
    rows = [covers.rows()[k] for k in covers.quick()]
    others = [row for row in covers.rows() if row["model"] not in covers.LATER]
    for name, values in covers.FACTORS.items():
        assert {row[name] for row in rows} == set(values) - {*covers.LATER}, name
    quick, every = (
        {pair for row in some for pair in met(covers.QUICK, row)} for some in (rows, others)
    )
    assert len(quick) >= covers.SHARE * len(every)
    assert 60 <= len(rows) < 0.25 * len(covers.rows())


@pytest.mark.long
def test_the_sizes_of_models_are_those_that_the_cover_counts_with() -> None:
    for model in covers.SIZES.keys() - {"sequential"}:
        program = compositions.captured(model).program
        stages = tuple(pp for pp in range(1, 9) if has_stages(program, pp))
        assert covers.SIZES[model] == (len(blocks_of(program)), stages), model


def test_a_fault_in_any_composition_is_seen() -> None:
    """The control: in each of these the last microbatch's gradients come too late."""
    several = [
        c
        for k, (c, _) in enumerate(covers.cover())
        if k in covers.quick()
        and c.microbatches > 1
        and (c.precision, c.zero, c.tp, c.cp) == ("float64", 0, 1, 1)
        and c.model != "keywords"  # whose last row may weigh nothing
    ]
    tried = 0
    for c in several[:: len(several) // 6]:
        with faults.inject("lose_last_gradient"):
            run = compositions.run(c, steps=1)
        assert parity.differences(parity.RunOutcome.of(run), compositions.expected(c, 1)), c
        tried += 1
    assert tried >= 6


@pytest.mark.parametrize("what", [dict(), dict(model="quantised")])
def test_a_fault_in_a_narrow_precision_is_seen(what: dict[str, Any]) -> None:
    """The control of float16 and float8: their tolerances let no lost gradient pass."""
    precision = next(iter(compositions.FLOAT8)) if what else "float16"
    given: dict[str, Any] = dict(model="gpt", microbatches=2, precision=precision) | what
    c = Composition(**given)
    peak = judge(c).memory[0].peak
    planned = compositions.compiled(c).plan.role_of(0).peak_bytes
    assert what or peak == planned, "the float32 weights of a norm on a CPU, to the byte"
    with faults.inject("lose_last_gradient"), pytest.raises(AssertionError, match="one device"):
        judge(c)


def _have_the_fields_beside_the_factors(drawn: list[Composition]) -> None:
    for name, wanted in BESIDE.items():
        assert wanted <= {getattr(c, name) for c in drawn}, name
    assert any(len(set(c.at)) < len(c.at) for c in drawn), "empty stages"
    assert any(c.axes for c in drawn), "orders of axes"
    assert any("+" in c.hidden for c in drawn), "experts cut along two axes"
    assert any(c.dp > 1 and not c.zero and not c.overlap_states for c in drawn), "overlap=False"


def test_the_quick_draws_have_every_field_and_every_precision() -> None:
    drawn = [drawn_compositions.drawn(seed, quick=True)[0] for seed in drawn_compositions.QUICK]
    _have_the_fields_beside_the_factors(drawn)
    kept = {c.precision if c.precision not in compositions.FLOAT8 else "float8" for c in drawn}
    assert kept == set(covers.WIDE.factors["precision"])
    assert {c.keep for c in drawn} >= {covers.PARTS, "outputs@*norm*"}
    assert {c.model for c in drawn} >= covers.DECODERS.keys()


@pytest.mark.long
def test_the_long_suite_draws_every_value_of_every_factor() -> None:
    seen: dict[str, set[Any]] = {name: set() for name in covers.WIDE.factors}
    for seed in range(1000):
        row = drawn_compositions.wide_row(seed)
        for name, value in row.items():
            seen[name].add(value)
    fields = [drawn_compositions.drawn(seed)[0] for seed in range(LONG)]
    _have_the_fields_beside_the_factors(fields)
    for name in ("folded", "hidden"):
        assert sum(bool(getattr(c, name)) for c in fields) >= 30, name
    precisions = {c.precision for c in fields}
    recipes = [
        {name.partition(",")[0] for name in some} for some in (compositions.FLOAT8, precisions)
    ]
    assert recipes[0] <= recipes[1], "recipes of float8"
    for name, values in covers.WIDE.factors.items():
        wanted = set(values) if name != "model" else set(covers.SIZES)
        assert wanted <= seen[name], name
