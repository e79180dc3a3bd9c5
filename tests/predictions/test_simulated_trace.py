"""What the simulator writes is what the report can show."""

import pytest

from packages.report.tests.chrome_documents import problems
from piper_compiler import Strategy, compile_program, recipes, synthetic
from piper_ir.ground.mesh import Mesh
from piper_report.facts.summary import beside_table, prediction_table
from piper_report.pages.chrome import chrome_trace
from piper_simulator import Simulation, simulate


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    program = synthetic(stages=3, F=0.3, I=0.4, W=0.2, params=64, hop=0.05)
    strategy = Strategy(
        Mesh(pp=3, dp=2), (*recipes.one_f_one_b(pp=3, microbatches=4), *recipes.data_parallel())
    )
    return simulate(compile_program(program, strategy).plan, "cpu-local", steps=2)


def test_a_simulated_trace_is_a_good_chrome_document(simulation: Simulation) -> None:
    document = chrome_trace(simulation.trace)
    assert problems(document) == []
    kinds = [e["ph"] for e in document["traceEvents"]]
    assert kinds.count("X") == len(simulation.trace.spans) and kinds.count("C") == len(
        simulation.trace.memory
    )
    assert document["otherData"]["cluster"] == "cpu-local"


def test_a_simulation_prints(simulation: Simulation) -> None:
    text = prediction_table(simulation, title="synthetic").plain()
    assert "durations from" in text and "given 100 %" in text
    assert "warning: cpu-local: assumed, not measured" in text


def test_a_simulation_beside_itself_is_exact(simulation: Simulation) -> None:
    class Run:
        step_s = [simulation.step_s]
        period_s = simulation.period_s
        peak_bytes = dict(enumerate(simulation.peak_bytes))
        trace = simulation.trace

    lines = beside_table(simulation, Run(), title="t").plain().splitlines()[3:-4]
    assert len(lines) == 2 + 2 * 6 and lines.pop(1).startswith("first step, alone")
    assert all(line.endswith(" 1.00") for line in lines)
