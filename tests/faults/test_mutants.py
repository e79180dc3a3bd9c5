"""Every seeded fault is caught by `verify` or by the parity suite, and nothing is caught where there is no fault."""

from __future__ import annotations

from typing import Any

import pytest

from piper_ir.verify import check
from tests.faults import dropless_faults, mutants, ring_faults
from tests.faults.mutants import CASES, MUTANTS, Mutant, Result
from tests.helpers import compositions, parity


@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_a_fault_nothing_is_caught(case: compositions.Composition) -> None:
    plan = mutants.plan_of(case)
    assert check(plan) == []
    parity.assert_parity(
        compositions.run(case, plan), compositions.expected(case), mutants.tolerance_of(case)
    )


OFTEN = ("counts_transposed", "a_round_lost", "combined_without_shares")
"""Of the faults of dropless mixtures."""
SELDOM = ring_faults.FAULTS.keys() | (dropless_faults.FAULTS.keys() - set(OFTEN))


def marked(mutant: Mutant) -> Any:
    """What packages/capture/tests/test_ring_attention.py shows of a chunk takes longer here."""
    return pytest.param(mutant, marks=[pytest.mark.long] * (mutant.name in SELDOM))


@pytest.mark.parametrize("mutant", map(marked, MUTANTS), ids=lambda m: f"{m.where}-{m.name}")
def test_the_fault_is_caught(mutant: Mutant) -> None:
    result = mutants.judge(mutant, by_all=False)
    assert result.caught, f"{mutant.about} (nothing notices)"


def test_there_are_twenty_of_each() -> None:
    for where in ("compiler", "runtime"):
        names = [m.name for m in MUTANTS if m.where == where]
        assert len(names) == len(set(names)) >= 20


def test_a_fault_without_effect_survives_and_is_shown() -> None:
    harmless = Mutant("harmless", "compiler", "nothing happens", lambda plan: plan)
    result = mutants.judge(harmless, cases=CASES[:2])
    assert not result.caught
    assert "SURVIVES: nothing happens" in mutants.table([result])


def test_a_fault_without_a_place_is_an_error() -> None:
    with pytest.raises(ValueError, match="nowhere finds no place"):
        mutants.judge(Mutant("nowhere", "compiler", "", lambda plan: None))


def test_the_table_decides_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def judge(mutant: Mutant) -> Result:
        return Result(mutant, "", "" if mutant is MUTANTS[0] else "step 0, loss", "case")

    monkeypatch.setattr(mutants, "judge", judge)
    assert mutants.main() == 1
    assert f"{len(MUTANTS) - 1} of {len(MUTANTS)} faults are caught" in capsys.readouterr().out
    monkeypatch.setattr(mutants, "MUTANTS", MUTANTS[1:])
    assert mutants.main() == 0
