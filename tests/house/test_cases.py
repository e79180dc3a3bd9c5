"""A test that runs its cases in a row fails if any case does, names each that fails, and keeps cases apart."""

from pathlib import Path

import pytest

from tests.helpers.cases import each_case


def test_all_cases_run_and_those_that_fail_are_named() -> None:
    seen = []

    @each_case(("a", "b"), [(1, 1), (2, 3), (4, 4), (5, 5)], ids=["one", "two", "four", "five"])
    def equal(a: int, b: int) -> None:
        seen.append(a)
        with pytest.raises(ValueError):
            if a < 4:
                raise ValueError
        assert a == b

    with pytest.raises(
        BaseExceptionGroup, match="3 of 4 cases failed: 1: two; 2: four; 3: five"
    ) as error:
        equal()
    assert seen == [1, 2, 4, 5]
    assert [type(e) for e in error.value.exceptions] == [
        AssertionError,
        *2 * [pytest.fail.Exception],
    ]


def test_names_without_cases_are_an_error() -> None:
    for names, cases in (("a", []), (("a", "b"), [(1,)])):
        with pytest.raises(ValueError, match="do not give"):
            each_case(names, cases)


@each_case("row", [0, 1])
@each_case("column", [0, 1])
def test_cases_share_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    row: int,
    column: int,
) -> None:
    import conftest

    assert not hasattr(conftest, "changed") and not [*tmp_path.iterdir()]
    monkeypatch.setattr(conftest, "changed", True, raising=False)
    (tmp_path / "file").touch()
    print(row, column)
    assert capsys.readouterr().out == f"{row} {column}\n"
    print("left over")


def test_a_case_that_skips_hides_no_failure_and_ends_no_other_case() -> None:
    seen = []

    @each_case("n", [0, 1, 2])
    def some(n: int) -> None:
        seen.append(n)
        if n == 1:
            pytest.skip("not here")
        assert n != 0

    @each_case("n", [0, 1])
    def none(n: int) -> None:
        pytest.skip("not here")

    with pytest.raises(BaseExceptionGroup, match="1 of 3 cases failed: 0: 0"):
        some()
    assert seen == [0, 1, 2]
    with pytest.raises(pytest.skip.Exception):
        none()
