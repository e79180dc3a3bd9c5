"""Costs are looked up exactly and between measured sizes, refuse nonsense, and survive JSON."""

import pytest

from piper_ir.ground.codec import dumps, loads
from piper_ir.ground.errors import FormatError
from piper_ir.program.costs import (
    AllocatorCosts,
    CommDuration,
    Costs,
    Duration,
    HostCosts,
    Origin,
    PartDuration,
    StepDuration,
)
from tests.helpers.cases import each_case

COSTS = Costs(
    {"layer0": {"F": Duration(0.5), "I": Duration(0.25, "table")}},
    (CommDuration("all_reduce", 1024, 4, Duration(1e-4, "interpolated")),),
    rows=8,
)
MEASURED = Costs(
    comm=tuple(
        CommDuration("p2p", n, 2, Duration(1e-6 * n, spread=1e-7 * n), busy_s=1e-7 * n)
        for n in (16, 64)
    ),
    steps=tuple(
        StepDuration("code", "F", rows, Duration(seconds)) for rows, seconds in ((8, 4.0), (2, 1.0))
    ),
    parts=(PartDuration("Update", 100, Duration(2.0)), PartDuration("Update", 400, Duration(4.0))),
    host=HostCosts(1e-6, 2e-6),
    allocator=AllocatorCosts(1 << 20, 1.5),
    origin=Origin(
        "a processor, 2 cores",
        "cpu-local",
        "gloo",
        "processes",
        2,
        1,
        "3.11",
        "2.13",
        "key",
        "2026-01-01",
        7,
    ),
)


def test_lookup_is_exact() -> None:
    assert COSTS.of_compute("layer0", "F") == Duration(0.5, "measured")
    assert COSTS.of_compute("layer0", "W") is COSTS.of_compute("layer1", "F") is None
    assert COSTS.of_comm("all_reduce", 1024, 4) == Duration(1e-4, "interpolated")
    assert (
        COSTS.of_comm("all_reduce", 1025, 4)
        is COSTS.of_comm("p2p", 1024, 4)
        is COSTS.of_comm("all_reduce", 1024, 2)
        is None
    )


def test_steps_are_found_by_code_at_their_rows_and_between() -> None:
    """Return costs measured at 2 and 8 rows, proportional to them."""
    assert MEASURED.of_compute("any chunk", "F", "code", 2) == Duration(1.0)
    between = MEASURED.of_compute("any chunk", "F", "code", 4)
    assert (
        between is not None
        and between.source == "interpolated"
        and between.seconds == pytest.approx(2.0)
    )
    assert (
        MEASURED.of_compute("any chunk", "W", "code", 2)
        is MEASURED.of_compute("any chunk", "F", "other", 2)
        is None
    )
    assert MEASURED.of_compute("any chunk", "F", "code") == Duration(4.0), (
        "for weights: at the most rows"
    )
    assert MEASURED.rows_of("code", "F") == (2, 8) and MEASURED.rows_of("code", "W") == ()


def test_nothing_is_known_more_than_a_factor_of_2_outside() -> None:
    for rows, seconds in ((1, 0.5), (16, 8.0)):
        found = MEASURED.of_compute("c", "F", "code", rows)
        assert (
            found is not None
            and found.source == "interpolated"
            and found.seconds == pytest.approx(seconds)
        )
    assert MEASURED.of_compute("c", "F", "code", 17) is None
    assert MEASURED.of_comm("p2p", 128, 2) is not None
    assert MEASURED.of_comm("p2p", 129, 2) is None


def test_a_duration_by_chunk_comes_before_those_by_code() -> None:
    both = Costs({"c": {"F": Duration(9.0, "table")}}, steps=MEASURED.steps)
    assert both.of_compute("c", "F", "code", 2) == Duration(9.0, "table")
    assert both.of_compute("d", "F", "code", 2) == Duration(1.0)


def test_a_message_below_the_smallest_takes_as_long_as_that() -> None:
    assert MEASURED.of_comm("p2p", 1, 2) == Duration(16e-6, "interpolated", 16e-7)
    assert MEASURED.of_comm("p2p", 1, 2, nodes=2) is None, "measured within a node"
    assert MEASURED.of_part("Update", 10) == Duration(2.0, "interpolated")


def test_spread_and_processor_time_grow_with_the_message() -> None:
    found = MEASURED.of_comm("p2p", 32, 2)
    assert found is not None and (found.seconds, found.spread) == pytest.approx((32e-6, 32e-7))
    assert MEASURED.busy_s("p2p", 32, 2) == pytest.approx(32e-7)
    assert MEASURED.busy_s("all_reduce", 32, 2) == 0.0


def test_the_square_root_lies_between() -> None:
    """An update takes 2 s at 100 bytes and 4 s at 400: its time goes with the square root of the bytes."""
    found = MEASURED.of_part("Update", 200)
    assert found is not None and found.seconds == pytest.approx(2.0 * 2**0.5)


def test_two_durations_of_one_thing_are_refused() -> None:
    with pytest.raises(FormatError, match=r"two durations of \('code', 'F'\) at 2; one is needed"):
        Costs(steps=(MEASURED.steps[1], MEASURED.steps[1]))


def test_json_both_ways() -> None:
    assert loads(Costs, dumps(MEASURED)) == MEASURED
    assert loads(Costs, dumps(MEASURED)).of_compute("c", "F", "code", 8) == Duration(4.0)
    assert loads(Costs, dumps(COSTS)) == COSTS
    assert loads(Costs, dumps(COSTS)).of_comm("all_reduce", 1024, 4) == Duration(
        1e-4, "interpolated"
    )


@each_case("seconds", [-1.0, float("inf"), float("nan")])
def test_a_duration_is_finite_and_not_negative(seconds: float) -> None:
    with pytest.raises(FormatError, match="a finite number that is not negative is needed"):
        Duration(seconds)


def test_unknown_steps_and_keys_are_refused() -> None:
    with pytest.raises(FormatError, match="duration for step 'X'; the steps are F, R, I, W and B"):
        Costs({"layer0": {"X": Duration(1.0)}})
    with pytest.raises(FormatError, match="unknown key 'second'"):
        loads(Costs, dumps(COSTS).replace('"seconds"', '"second"', 1))
    with pytest.raises(FormatError, match="unknown key 'gpu' in Origin"):
        loads(Costs, dumps(MEASURED).replace('"device"', '"gpu"', 1))
