"""States that ranks share, their buffers and recomputation in memory lines, in the legend and in the colours of
figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

import piper
from piper import models
from piper.api.ground.results import save_plan, save_prediction
from piper.models import GPTConfig
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Compute
from piper_report import load, write_report
from piper_report.figures import gantt, memory_figure
from piper_report.figures.style import CATEGORIES
from piper_simulator import Simulation, load_cluster, simulate

SIZES = GPTConfig(layers=2, width=32, heads=2, vocab=64, length=16)


def strategy_of(zero: int, keep: str = "all") -> piper.Strategy:
    again = () if keep == "all" else (piper.recompute(piper.where(), keep=keep),)
    directives = (
        *piper.recipes.one_f_one_b(pp=2, microbatches=2),
        *piper.recipes.data_parallel(zero=zero),
        *again,
    )
    return piper.Strategy(piper.Mesh(pp=2, dp=2), directives)


def plan_of(zero: int, keep: str = "all") -> Plan:
    return piper.compile(
        models.job(SIZES, global_batch=8, clip_norm=1.0), strategy_of(zero, keep)
    ).plan


@pytest.fixture(scope="module")
def shared() -> Plan:
    return plan_of(3, "inputs")


@pytest.fixture(scope="module")
def simulation(shared: Plan) -> Simulation:
    return simulate(shared, load_cluster("h100x8"))


@pytest.mark.long
def test_what_was_made_again_has_a_line_of_its_own(shared: Plan, simulation: Simulation) -> None:
    lines = simulation.memory(0)
    for name in (
        "parameters",
        "master",
        "gradients",
        "optimizer",
        "gathered_parameters",
        "recomputed_activations",
    ):
        assert lines[name] > 0, name
    again = {
        v for i in shared.roles[0].program for p in i.parts for v in p.writes if is_again(p.op)
    }
    most = sum(shared.values[v].nbytes for v in again if v.endswith("@0"))
    assert lines["recomputed_activations"] <= most, "of one microbatch at a time"
    plain = simulate(plan_of(0), load_cluster("h100x8")).memory(0)
    assert (
        plain["recomputed_activations"]
        == plain["gathered_parameters"]
        == plain["gradient_buffers"]
        == 0
    )
    assert plain["activations"] > lines["activations"]
    assert [plain[n] for n in ("master", "optimizer")] == [
        pytest.approx(2 * lines[n], rel=0.01) for n in ("master", "optimizer")
    ]


def is_again(op: object) -> bool:
    return isinstance(op, Compute) and op.step == "R"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[str]]]:
    """The texts of the legends of figures, by name."""
    found: dict[str, list[str]] = {}

    def kept(figure: Figure, name: str, *_: object, **__: object) -> object:
        found[name] = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
        return None

    for module in (gantt, memory_figure):
        monkeypatch.setattr(module, "picture", kept)
    yield found


def test_legends_name_gathers_scatters_folds_and_shares(
    shared: Plan, simulation: Simulation, drawn: dict[str, list[str]]
) -> None:
    gantt.timelines([simulation.trace], shared)
    words = drawn["timeline"]
    for name in (
        "gather of parameters",
        "reduce-scatter of gradients",
        "gradient buffer or its fold",
        "backward after recomputation",
    ):
        assert name in words, name
    memory_figure.memory_figure(simulation.trace, None, shared)
    assert {
        "parameters (1/2)",
        "master parameters (1/2)",
        "gradients (1/2)",
        "optimizer (1/2)",
    } <= set(drawn["memory"])
    assert {"gathered parameters", "gradient buffers"} <= set(drawn["memory"])
    plain = plan_of(0)
    trace = simulate(plain, load_cluster("h100x8")).trace
    gantt.timelines([trace], plain)
    memory_figure.memory_figure(trace, None, plain)
    assert not {
        w
        for w in (*drawn["timeline"], *drawn["memory"])
        if "gather" in w or "fold" in w or "1/2" in w or "recomp" in w
    }


def test_gathers_and_scatters_have_the_colours_of_their_buffers(
    shared: Plan, simulation: Simulation
) -> None:
    found = {
        label.phase: gantt._look(label)[0]
        for label in gantt.kinds(simulation.trace, shared).values()
    }
    assert found["gather"] == to_rgb(CATEGORIES["gathered"]) and found["scatter"] == to_rgb(
        CATEGORIES["reduced"]
    )


@pytest.mark.long
def test_the_report_has_the_lines(shared: Plan, simulation: Simulation, tmp_path: Path) -> None:
    save_plan(tmp_path, shared, strategy_of(3, "inputs"))
    save_prediction(tmp_path, simulation, shared)
    text = (write_report(tmp_path).html.parent / "memory_lines.csv").read_text()
    predicted = load(tmp_path).predicted
    assert predicted is not None
    for name in ("gathered parameters", "recomputed activations"):
        assert f"{name},{predicted.memory[name.replace(' ', '_')]}," in text
