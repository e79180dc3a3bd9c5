"""Software stacks: a fit finds constants that it was not told, from the rows that it may take, and writes them to a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from piper.cli import app
from piper.published.fitting import Fit, fit
from piper.published.scoring import RunPrediction
from piper.published.stack_file import check_target, write_stack
from piper.published.table import PublishedRow, read_row, write_rows
from piper.views.accuracy_tables import DECIDED, fit_table
from piper_ir.ground.errors import ClusterError, JobError, PiperWarning
from piper_simulator import SOFTWARE, STACKS, Stack, StackConstant, read_software
from tests.predictions.test_accuracy import TINY

START = SOFTWARE["blackwell-megatron"]


def _fit_of_rows_that_differ_in(column: str) -> tuple[list[PublishedRow], Fit]:
    """Return steps of a stack with other constants, and the fit of two constants to them from another start."""
    truth = _with(_with(START, "matmul", 0.60), "memory", 0.48)
    rows = [read_row({**TINY, "case": str(k), column: str(64 * k)}) for k in range(1, 7)]
    made = [replace(r, step_s=p.step_s) for r, p in zip(rows, _made(rows, truth), strict=True)]
    return made, fit(made, START, ["matmul", "memory"], _made)


def test_a_fit_finds_constants_that_it_was_not_told() -> None:
    made, found = _fit_of_rows_that_differ_in("hidden")
    assert found.after < 0.02 < 0.04 < found.before
    assert found.stack.number["matmul"] == pytest.approx(0.60, rel=0.08)
    assert found.stack.number["memory"] == pytest.approx(0.48, rel=0.08)
    assert found.stack.constants["memory"].fitted and not found.stack.constants["memory"].at_bound
    assert all(share > DECIDED for share in found.by_runs.values())
    wrong = [replace(r, step_s=(r.step_s or 0) * 2.5) for r in made]  # nothing physical explains it
    bound = fit(wrong, START, ["matmul", "memory"], _made).stack
    assert any(c.at_bound for c in bound.constants.values())
    assert all(c.low <= c.value <= c.high for c in bound.constants.values())


def test_runs_that_nothing_explains_are_said() -> None:
    made, _ = _fit_of_rows_that_differ_in("hidden")
    with pytest.raises(JobError, match="and 3 more: the fitted stack is more than 3 times away"):
        fit([replace(r, step_s=(r.step_s or 0) * 1000) for r in made], START, ["matmul"], _made)
    one = replace(made[0], step_s=(made[0].step_s or 0) * 1000)
    with pytest.warns(PiperWarning, match=f"^{one.case}: the fitted stack is more than 3 times"):
        fit([one, *made[1:]], START, ["matmul"], _made)
    again = replace(made[0], case="again", step_s=(made[0].step_s or 0) * 1.5)
    with pytest.warns(PiperWarning, match=f"{made[0].case}, again: equal in all columns"):
        fit([*made, again], START, ["matmul"], _made)


def test_a_fit_says_which_constants_its_runs_cannot_tell_apart() -> None:
    """All steps are made of the same shares, so that only a product of powers of both constants is known."""
    _, found = _fit_of_rows_that_differ_in("ffn")
    assert found.after < 0.02 and found.by_runs["memory"] < DECIDED < found.by_runs["matmul"]
    (note,) = [n for n in fit_table(found, "mine.toml", ()).notes if "decided by the runs" in n]
    assert note.startswith("memory: ")


def _made(rows: Sequence[PublishedRow], stack: Stack) -> list[RunPrediction]:
    """Predict steps by a law: products, bytes and a rest, in shares that depend on the row."""
    return [
        RunPrediction(r, (r.hidden / stack.number["matmul"] + 200 / stack.number["memory"] + 50,))
        for r in rows
    ]


def _with(stack: Stack, name: str, value: float) -> Stack:
    return replace(
        stack, constants={**stack.constants, name: replace(stack.constants[name], value=value)}
    )


def test_few_runs_and_unknown_constants_are_refused() -> None:
    tiny = read_row(TINY)
    stack = SOFTWARE["blackwell-megatron"]
    with pytest.raises(JobError, match="at least 5 runs of 2 models; these are 4 runs of 1"):
        fit([tiny] * 4, stack, ["matmul"], _made)
    with pytest.raises(JobError, match="these are 6 runs of 1"):
        fit([replace(tiny, seq=256 * k) for k in range(1, 7)], stack, ["matmul"], _made)
    models = [replace(tiny, layers=k) for k in range(1, 7)]
    with pytest.raises(JobError, match="--free speed"):
        fit(models, stack, ["speed"], _made)


def test_a_written_stack_is_read_again(tmp_path: Path) -> None:
    stack = _with(SOFTWARE["hopper-nemo"], "matmul", 0.5)
    write_stack(tmp_path / "mine.toml", stack, "hopper-nemo")
    again = read_software(tmp_path / "mine.toml", STACKS)
    assert again == replace(stack, name="mine", words=again.words, source=again.source)
    text = (tmp_path / "mine.toml").read_text().replace("value = 0.5", "value = 0.95")
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ClusterError, match=r"constants.matmul: value 0.95 .* must be from low"):
        read_software(tmp_path / "mine.toml", STACKS)
    (tmp_path / "lab.toml").write_text('[stacks.mine]\nbase = "hopper-nemo"\n')
    with pytest.raises(ClusterError, match=r"lab.toml: a cluster's file; .* \[stacks.NAME\]"):
        read_software(tmp_path / "lab.toml", STACKS)


def test_a_stack_that_was_fitted_from_a_file_is_read_again(tmp_path: Path) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text(_ODD, encoding="utf-8")
    start = read_software(first, STACKS)
    write_stack(second, replace(_with(start, "matmul", 0.41234564), seen=0.3), str(first))
    again = read_software(second, STACKS)
    assert again == replace(start, name="second", seen=0.3), "a value stays from low to high"
    assert second.read_text(encoding="utf-8").startswith("# our own\n")
    check_target(second, start)
    for text, why in (("name = 'x'", "no file of a stack"), (_ODD, "with other facts .*attention")):
        second.write_text(text.replace("flash-2", "flash-1"), encoding="utf-8")
        with pytest.raises(JobError, match=why):
            check_target(second, start)


_ODD = """# our own
base = "hopper-nemo"
attention = "flash-2"
[constants]
matmul = { value = 0.4123456789, low = 0.4123456789, high = 0.8, prior = 0.6, source = 'our "own" \\' }
[passes]
clone = 3
"""


def test_a_fit_takes_measured_rows_of_its_device_and_says_which_it_left_out(tmp_path: Path) -> None:
    table, file = tmp_path / "runs.csv", tmp_path / "own.toml"
    of_run = {**TINY, "step_s": "0.06"}
    rows = [{**of_run, "case": f"r{k}", "layers": str(2 + k % 2)} for k in range(5)]
    rows += [{**TINY, "case": "far", "block": "outlier"}, {**TINY, "case": "wish", "step_s": ""}]
    rows += [{**TINY, "case": "wrong", "dtype": "fp8"}, {**TINY, "case": "odd", "heads": "7"}]
    write_rows(table, rows)
    options = ["--fit", str(file), "--free", "matmul"]
    done = CliRunner().invoke(app, ["accuracy", str(table), *options])
    assert done.exit_code == 0 and "5 runs: mean error" in done.stdout, done.output
    for said in ('1 row (far): block is "outlier"', "1 row (wish): step_s is empty"):
        assert f"left out: {said}" in done.stdout
    assert "1 row (wrong): line 9: dtype" in done.stdout and "1 row (odd): tp = 2" in done.stdout
    again = ["--stack", str(file), "--fit", str(file), "--free", "memory"]
    assert CliRunner().invoke(app, ["accuracy", str(table), *again]).exit_code == 0
    fitted = {n for n, c in read_software(file, STACKS).constants.items() if c.fitted}
    assert {"matmul", "memory"} <= fitted
    write_stack(file, STACKS["hopper-torch"], "hopper-torch")
    assert not any(c.fitted for c in read_software(file, STACKS).constants.values())
    write_rows(table, [*rows, {**TINY, "case": "a100", "hw": "a100-80g-sxm"}])
    wrong = CliRunner().invoke(app, ["accuracy", str(table), *options, "--stack", "blackwell-nemo"])
    assert wrong.exit_code == 2 and "a100 is of a100-80g-sxm, and blackwell-nemo of" in wrong.stderr


def test_a_constant_that_may_be_0_is_fitted_within_a_narrow_range() -> None:
    hidden = StackConstant(value=0, low=0, high=0.04, prior=0, source="x")
    stack = replace(SOFTWARE["blackwell-megatron"], constants={"hidden": hidden})
    models = [replace(read_row(TINY), layers=k) for k in range(1, 6)]

    def predicted(rows: Sequence[PublishedRow], changed: Stack) -> list[RunPrediction]:
        return [RunPrediction(r, (r.step_s * (1.02 - changed.number["hidden"]),)) for r in rows]  # type: ignore[operator]  # it is known

    found = fit(models, stack, ["hidden", "hidden"], predicted)
    assert 0 < found.stack.number["hidden"] <= 0.04 and found.stack.seen >= found.after
    still = replace(hidden, high=0)
    with pytest.raises(JobError, match="low and high are the same"):
        fit(models, replace(stack, constants={"hidden": still}), ["hidden"], predicted)


def test_committed_stacks_hold_at_most_eight_constants_within_their_ranges() -> None:
    for stack in SOFTWARE.values():
        assert 0 < len(stack.constants) <= 8 and stack.devices and stack.source
        assert not [n for n, c in stack.constants.items() if c.at_bound], stack.name
