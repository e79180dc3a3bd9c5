"""Protect that every seeded fault is caught by `verify` or by the parity suite, and nothing without a fault."""

from __future__ import annotations

from typing import Any

import pytest

from piper_ir.verify import check
from tests.faults import dropless_faults, mutants, ring_faults
from tests.faults.mutants import CASES, MUTANTS, Mutant, Result
from tests.helpers import compositions, parity
from tests.helpers.cases import each_case


@pytest.mark.long
@each_case("case", CASES)
def test_without_a_fault_nothing_is_caught(case: compositions.Composition) -> None:
    plan = mutants.plan_of(case)
    assert check(plan) == []
    parity.assert_parity(
        compositions.run(case, plan), compositions.expected(case), mutants.tolerance_of(case)
    )


OFTEN = ("counts_transposed", "a_round_lost", "combined_without_shares")
"""Of the faults of dropless mixtures."""
SELDOM = ring_faults.FAULTS.keys() | (dropless_faults.FAULTS.keys() - set(OFTEN))
"""The faults for the long suite: packages/capture/tests/test_ring_attention.py shows the same sooner, on a chunk."""
TOGETHER = 5
"""The number of faults that one case tries."""
QUICK = frozenset({"no_receive_wait", "narrow_reduction", "attribute_left"})
"""One fault of each kind, whose groups `make test` runs; those of jobs capture a model for nearly every fault."""


def grouped() -> list[Any]:
    """Return faults of one kind in groups, each named by its first."""
    groups = []
    for where in ("compiler", "runtime", "job"):
        for seldom in (False, True):
            kind = [m for m in MUTANTS if m.where == where and (m.name in SELDOM) == seldom]
            for k in range(0, len(kind), TOGETHER):
                group = kind[k : k + TOGETHER]
                name = f"{where}-{group[0].name}"
                marks = [pytest.mark.long] * QUICK.isdisjoint(m.name for m in group)
                groups.append(pytest.param(group, marks=marks, id=name))
    return groups


@pytest.mark.parametrize("group", grouped())
def test_the_faults_are_caught(group: list[Mutant]) -> None:
    results = [mutants.judge(mutant, by_all=False) for mutant in group]
    assert all(result.caught for result in results), "\n" + mutants.table(results)


def test_each_fault_is_in_one_group() -> None:
    quick = [{m.name for m in p.values[0]} & QUICK for p in grouped() if not p.marks]
    assert len(quick) == len(QUICK) and all(len(names) == 1 for names in quick)
    assert sorted(m.name for p in grouped() for m in p.values[0]) == sorted(m.name for m in MUTANTS)


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
        mutants.judge(Mutant("nowhere", "compiler", "", lambda plan: None), cases=CASES[:2])


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
