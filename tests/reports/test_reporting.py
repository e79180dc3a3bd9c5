"""What Piper writes into result folders is what its reports read; a report that fails costs nothing but itself."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from piper.api.ground.results import save_plan, save_prediction, save_run
from piper.views.reporting import report, report_at_end
from piper_compiler import Strategy, compile_program, recipes, synthetic
from piper_ir.ground.errors import FormatError
from piper_ir.ground.mesh import Mesh
from piper_ir.plan.plan_file import read_plan
from piper_simulator import simulate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulation as `piper simulate --out` saves it."""
    out = tmp_path_factory.mktemp("results")
    strategy = Strategy(Mesh(pp=2), recipes.one_f_one_b(pp=2, microbatches=3))
    plan = compile_program(synthetic(stages=2, F=1e-3, I=1e-3, W=1e-3, params=64), strategy).plan
    save_plan(out, plan, strategy)
    save_prediction(out, simulate(plan, "cpu-local"), plan)
    return out


def test_a_saved_simulation_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = report(folder)
    text = capsys.readouterr().out
    assert made.html.is_file() and {p.stem for p in made.figures} == {"timeline", "memory"}
    assert (
        text.splitlines()[0] == "Headline"
        and "step in steady state" in text
        and str(made.html) in text
    )


def test_a_saved_run_has_flows_if_it_ended_under_its_plan(folder: Path, tmp_path: Path) -> None:
    plan = read_plan((folder / "plan.json").read_text(), "plan.json")
    trace = replace(simulate(plan, "cpu-local").trace, kind="executed")
    counts = []
    for key in (plan.key, "of another plan"):
        run = SimpleNamespace(
            losses=[1.0], step_s=[1.0], batch_s=[0.0], period_s=None, peak_bytes={}, restarts=(),
            trace=replace(trace, plan_key=key),
        )  # fmt: skip
        save_run(tmp_path, run, plan)
        events = json.loads((tmp_path / "trace-measured.json").read_text())["traceEvents"]
        counts.append(sum(e["ph"] == "s" for e in events))
    sends = sum(s.name.startswith("send.") for s in trace.spans)
    assert counts == [sends, 0] and sends == 6


def test_a_report_that_fails_at_the_end_is_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "measured.json").write_text(json.dumps({"losses": [1.0], "step_s": [1.0]}))
    (tmp_path / "report").write_text("in the way")
    assert report_at_end(tmp_path) is None
    assert capsys.readouterr().err.startswith("warning: no report: cannot write the report to")


def test_asked_for_a_report_the_error_is_the_callers(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="holds no results"):
        report(tmp_path)
