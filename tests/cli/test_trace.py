"""Protects: `piper trace` reads the traces that `piper run --profiler` writes, and refuses what is no trace."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.command_line import command, fails


def test_the_command_compares_and_calibrates(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "profiled"
    ran = command(
        "run", recipe, "--launcher", "processes", "--steps", 2, "--profiler", run, "--out", tmp_path
    )
    assert ran.exit_code == 0, ran.output
    traces = sorted(run.iterdir())
    assert [t.name for t in traces] == ["rank0_trace.json.gz", "rank1_trace.json.gz"]
    costs = tmp_path / "costs.json"
    traced = command("trace", *traces, "--job", recipe, "--calibrate", costs, "--json")
    facts = json.loads(traced.stdout)
    assert facts["missing"] == [] and facts["step_s"]["measured"] > 0
    assert command("simulate", recipe, "--costs", costs).exit_code == 0
    assert "--calibrate: no trace" not in traced.output
    alone = command("trace", traces[0], "--job", recipe, "--calibrate", tmp_path / "alone.json")
    assert alone.exit_code == 0 and "--calibrate: no trace is of rank 1 (pp1)" in alone.output
    fails(command("trace", *traces, "--calibrate", costs), "--calibrate", "--job FILE.py")
    wide = tmp_path / "wide.py"
    wide.write_text(
        recipe.read_text(encoding="utf-8").replace("Linear(4, 4)", "Linear(4, 4, bias=False)")
    )
    refused = command("trace", *traces, "--job", wide, "--calibrate", costs)
    fails(refused, "its model or loss is another one")
    for parts in (1, 4):
        text = recipe.read_text(encoding="utf-8")
        other = tmp_path / f"other{parts}.py"
        assert "microbatches=2" in text
        other.write_text(text.replace("microbatches=2", f"microbatches={parts}"), encoding="utf-8")
        refused = command("trace", *traces, "--job", other, "--calibrate", costs)
        fails(refused, "of another job or strategy", "without a range" if parts == 4 else "lacks")
    fails(command("trace", recipe), "recipe.py", "torch.profiler")
