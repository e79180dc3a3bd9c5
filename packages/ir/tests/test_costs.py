"""Costs: exact look-up, refusal of nonsense, JSON both ways."""

import pytest

from piper_ir.codec import dumps, loads
from piper_ir.costs import CommDuration, Costs, Duration
from piper_ir.errors import FormatError

COSTS = Costs(
    {"layer0": {"F": Duration(0.5), "I": Duration(0.25, "table")}},
    (CommDuration("all_reduce", 1024, 4, Duration(1e-4, "interpolated")),),
    rows=8,
)


def test_lookup_is_exact() -> None:
    assert COSTS.of_compute("layer0", "F") == Duration(0.5, "measured")
    assert COSTS.of_compute("layer0", "W") is COSTS.of_compute("layer1", "F") is None
    assert COSTS.of_comm("all_reduce", 1024, 4) == Duration(1e-4, "interpolated")
    assert COSTS.of_comm("all_reduce", 1025, 4) is COSTS.of_comm("p2p", 1024, 4) is COSTS.of_comm("all_reduce", 1024, 2) is None


def test_json_both_ways() -> None:
    assert loads(Costs, dumps(COSTS)) == COSTS
    assert loads(Costs, dumps(COSTS)).of_comm("all_reduce", 1024, 4) == Duration(1e-4, "interpolated")


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_a_duration_is_finite_and_not_negative(seconds: float) -> None:
    with pytest.raises(FormatError, match="a finite number that is not negative is needed"):
        Duration(seconds)


def test_unknown_steps_and_keys_are_refused() -> None:
    with pytest.raises(FormatError, match="duration for step 'B'; the steps are F, I and W"):
        Costs({"layer0": {"B": Duration(1.0)}})
    with pytest.raises(FormatError, match="unknown key 'second'"):
        loads(Costs, dumps(COSTS).replace('"seconds"', '"second"', 1))
