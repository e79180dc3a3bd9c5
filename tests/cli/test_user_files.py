"""What a user defines in a file of their own (examples/own_*.py) has the standing of what is built in: it prints, is
saved and read back, simulates, is verified against plain PyTorch, and runs."""

from __future__ import annotations

import json
import runpy
from functools import cache
from math import isfinite
from pathlib import Path

import pytest

import piper
from piper.api.ground.costs_file import load_costs
from piper.api.reference.verification import verify_strategy
from piper.cli.loading import JobFile, load_file
from piper.views.explained.explain import explain
from piper_ir.ground.errors import JobError
from piper_ir.program.program import Kernel
from tests.helpers.command_line import command, fails

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
OWN = ("directive", "recipe", "op", "cost", "model")


@cache
def loaded(name: str) -> JobFile:
    return load_file(EXAMPLES / f"own_{name}.py")


@cache
def compiled(name: str) -> piper.Compiled:
    return piper.compile(loaded(name).job, loaded(name).strategy)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", OWN)
def test_it_is_short_and_serialises_and_simulates_and_verifies_and_runs(
    name: str, tmp_path: Path
) -> None:
    assert len((EXAMPLES / f"own_{name}.py").read_text().splitlines()) <= 70
    file, made = loaded(name), compiled(name)
    piper.save_strategy(file.strategy, tmp_path / "s.json")
    assert piper.load_strategy(tmp_path / "s.json") == file.strategy
    piper.verify(made.plan)
    assert piper.simulate(made.plan, "h100x8").step_s > 0
    assert verify_strategy(file.job, file.strategy, steps=2).equal
    losses = piper.execute(made, steps=3, launcher="inline").losses
    assert len(losses) == 3 and all(map(isfinite, losses))


def test_a_directive_prints_and_bounds_memory() -> None:
    file, made = loaded("directive"), compiled("directive")
    assert "in_flight(where(stage=0), most=1)" in explain(made)
    free = piper.compile(
        file.job, piper.Strategy(file.strategy.mesh, file.strategy.directives[:-1])
    )
    assert (
        made.plan.roles[0].peak_by_category["activation"]
        < free.plan.roles[0].peak_by_category["activation"]
    )


def test_a_directives_conditions_name_where_it_was_written() -> None:
    file = loaded("directive")
    late = type(file.strategy.directives[-1])(piper.where(stage=0), most=8)
    with pytest.raises(
        piper.DirectiveError,
        match=r"at test_user_files\.py:\d+: there are 8 microbatches; .*condition 2",
    ):
        piper.compile(
            file.job, piper.Strategy(file.strategy.mesh, (*file.strategy.directives[:-1], late))
        )


def test_a_recipe_is_listed_and_shown(tmp_path: Path) -> None:
    path = EXAMPLES / "own_recipe.py"
    listing = command("recipes", path)
    assert "waves\n  formula  makespan (m/k)(k + p - 1)(F + B)" in listing.stdout
    shown = command(
        "show",
        path,
        "--recipe",
        "waves",
        "--pp",
        4,
        "--microbatches",
        8,
        "--times",
        "3,4,2",
        "--json",
    )
    numbers = json.loads(shown.stdout)
    assert (
        numbers["makespan_s"] == 8 / 4 * (4 + 4 - 1) * (3 + 6)
        and numbers["peak_activations"] == [4] * 4
    )
    wrong = command("show", path, "--recipe", "waves", "-p", "wave=0")
    assert (
        wrong.exit_code == 2 and "waves(wave=0): a wave has at least one microbatch" in wrong.stderr
    )


def kernels(made: piper.Compiled, step: str) -> list[Kernel]:
    return [k for chunk in made.plan.chunks for k in chunk.steps[step].cost.kernels]


def test_an_ops_formula_is_what_is_simulated() -> None:
    """4 layers of 64 columns on 4 rows: 3 FLOPs per element forward, 6 backward; three and five tensors of fp32
    moved."""
    plan = compiled("op").plan
    elements = plan.rows * 64
    forward = [k for k in kernels(compiled("op"), "F") if k.flops == 3 * elements]
    backward = [
        k for step in "IW" for k in kernels(compiled("op"), step) if k.flops == 6 * elements
    ]  # the first layer has no I
    assert sum(k.bytes == 3 * 4 * elements for k in forward) == 4
    assert sum(k.bytes == 5 * 4 * elements for k in backward) == 4


def test_an_op_that_is_not_registered_has_no_cost() -> None:
    with pytest.raises(
        ValueError, match=r"op_cost\('own_op::none'\): no such op; register it first"
    ):
        piper.op_cost("own_op::none", flops=lambda call: 0)


@pytest.mark.long
def test_costs_are_what_is_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(EXAMPLES / "own_cost.py"))
    names["main"]()
    costs = load_costs(tmp_path / "own_costs.json")
    assert costs == names["costs"]()
    spans = piper.simulate(compiled("cost").plan, "h100x8", costs=costs).trace.spans
    computing = sum(s.end - s.start for s in spans if s.stream == "compute")
    assert computing == pytest.approx(
        8 * (4 * 1e-3 + 3 * 1.2e-3 + 4 * 0.8e-3), rel=0.02
    )  # the first layer has no I
    assert any(s.source == "table" for s in spans)


def test_options_of_a_file_that_are_words_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(f'{(EXAMPLES / "own_cost.py").read_text()}\noptions = "inductor"\n')
    with pytest.raises(JobError, match="defines `options` that is a str"):
        load_file(path)


def test_errors_inside_of_a_file_are_said_with_its_line_in_words_of_python(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(
        f'{(EXAMPLES / "own_cost.py").read_text()}\nhow = piper.Options(kernels="triton")\n'
    )
    done = command("simulate", path)
    fails(done, "Options(kernels='triton'): 'eager' and 'inductor' are accepted (job.py, line ")
    assert "--kernels" not in done.stderr
