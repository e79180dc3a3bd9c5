"""Check that large objects show themselves in a few words, on a line and in a notebook."""

from functools import cache

from typer.testing import CliRunner

import piper
from piper.cli import app
from piper_autotune import Study
from piper_ir.study.study import Row


@cache
def compiled() -> piper.Compiled:
    program = piper.synthetic(stages=4, F=0.001, I=0.001, W=0.001, activation=2**20)
    return piper.compile(
        program, piper.Strategy(piper.Mesh(pp=4), piper.recipes.one_f_one_b(pp=4, microbatches=64))
    )


def test_what_is_compiled_says_where_it_comes_from_and_how_large_it_is():
    plan = "mesh Mesh(pp=4), microbatches 64 of 1 row, roles 4, instructions 1284, peak 4 MiB"
    assert repr(compiled().plan) == f"<Plan: {plan}>"
    assert len(repr(compiled().program)) < 200 and len(repr(compiled().graph)) < 100
    assert repr(compiled()) == f"<Compiled: program synthetic, chunks 4, parameters 0, {plan}>"


def test_a_simulation_says_its_headline():
    assert repr(piper.simulate(compiled().plan)) == (
        "<Simulation: step 201 ms, period 201 ms, ranks 4, fullest device 4 MiB, fits yes>"
    )


def test_a_study_says_its_best():
    rows = (Row(0, "rejected"), Row(1, "complete", {"microbatches": 8}, period_s=0.25))
    assert repr(Study("h100x8", None, 0, rows)) == (
        "<Study: cluster h100x8, candidates 2, of which 1 fit, best 250 ms per step, predicted, "
        "with microbatches=8>"
    )


def test_a_notebook_gets_a_table_with_text_that_is_no_markup():
    study = Study("<b>h100x8", None, 0, ())
    assert study._repr_html_() == (
        "<table><caption>Study</caption><tr><th>cluster</th><td>&lt;b&gt;h100x8</td></tr>"
        "<tr><th>candidates</th><td>0, of which 0 fit</td></tr></table>"
    )


def test_the_command_says_its_version():
    assert CliRunner().invoke(app, ["--version"]).output == f"piper {piper.__version__}\n"
