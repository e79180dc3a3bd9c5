"""Schedules drawn: for a terminal, and as a picture."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.report.tests import samples
from piper_compiler import Strategy, compile_program, recipes, synthetic
from piper_ir.ground.errors import OutputError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.trace import Span, Trace
from piper_ir.plan.plan import Instr, Plan
from piper_report import Drawing, draw_schedule, draw_schedules, schedule_table
from piper_report.figures.schedule_figure import PALEST
from piper_report.figures.style import PHASE_COLOURS, tint
from piper_simulator import simulate
from tests.helpers.cases import each_case

UNITS = {"F": 1.0, "I": 1.0, "W": 1.0}
ONE_F_ONE_B = """\
rank 0  F0 F1 .  .  B0==  F2 B1==  F3 B2==  .  B3==
rank 1  .  F0 B0==  F1 B1==  F2 B2==  F3 B3==  .  .

F forward; B backward (I and W together); the number is the microbatch; = goes on; . idle; a column is 1 s"""


def test_one_f_one_b_on_two_ranks() -> None:
    plan = samples.plan_of(pp=2, microbatches=4, **UNITS)
    assert schedule_table(simulate(plan).trace, plan, width=120) == ONE_F_ONE_B


def test_numbers_give_way_to_shape_where_there_is_no_room() -> None:
    plan = samples.plan_of(pp=4, microbatches=12, **UNITS)
    text = schedule_table(simulate(plan).trace, plan, width=56)
    assert text.splitlines()[3] == "rank 3  ...FB=FB=FB=FB=FB=FB=FB=FB=FB=FB=FB=FB=......"
    assert "the number is" not in text and "too short" not in text


def test_the_update_and_an_idle_rank_are_shown() -> None:
    spans = (
        Span(0, "compute", 0, "update", 2.0, 3.0),
        Span(0, "compute", 1, "c.F@0", 0.0, 1.0),
        Span(1, "x", 0, "s@0", 0.0, 3.0),
    )
    text = schedule_table(Trace("k", "simulated", spans), width=80)
    assert text.splitlines()[:2] == ["rank 0  F0 .  U", "rank 1  .  .  ."]
    assert "U optimizer update" in text


def paired() -> tuple[Trace, Plan]:
    """One rank: F0, then F1 and the backward of 0 in one instruction, then B1."""
    plan = samples.plan_of(pp=1, microbatches=2)
    (role,) = plan.roles
    first, second, *_ = (i.parts for i in role.program if i.parts[-1].node.startswith("stage0.F"))
    backs = [i.parts for i in role.program if i.parts[-1].node.startswith("stage0.W")]
    program = tuple(Instr("compute", parts) for parts in (first, (*second, *backs[0]), backs[1]))
    spans = tuple(Span(0, "compute", i, "x", 1.0 * i, 1.0 * i + 1) for i in range(3))
    return Trace(plan.key, "simulated", spans), replace(
        plan, roles=(replace(role, program=program),)
    )


def test_an_overlapped_pair_is_told_apart(tmp_path: Path) -> None:
    trace, plan = paired()
    lines = schedule_table(trace, plan, width=80).splitlines()
    assert lines[0] == "rank 0  F0    F1&B0 B1" and "F1&B0 overlapped pair" in lines[2]
    draw_schedule(trace, tmp_path / "pair.png", plan)
    assert (tmp_path / "pair.png").read_bytes().startswith(b"\x89PNG")


def tabulated(chunks: int, width: int, microbatches: int = 2) -> str:
    """Interleaved on two ranks."""
    program = synthetic(stages=2 * chunks, **UNITS)
    strategy = Strategy(
        Mesh(pp=2), recipes.interleaved(pp=2, microbatches=microbatches, chunks=chunks)
    )
    plan = compile_program(program, strategy).plan
    return schedule_table(simulate(plan).trace, plan, width=width)


def test_the_second_chunk_is_in_lower_case() -> None:
    lines = tabulated(2, 120).splitlines()
    assert lines[0] == "rank 0  F0 F1 f0 f1 .  .  b0==  .  b1==  B0==  B1=="
    assert "lower case: the device's second chunk" in lines[3]
    narrow = tabulated(2, 40, microbatches=4).splitlines()
    assert narrow[
        1
    ] == "rank 1  .FFfb=fb=FB=FB=fb=fb=B=B=.." and "lower case: the device's second" in "".join(
        narrow
    )


def test_of_more_chunks_each_has_a_letter() -> None:
    lines = tabulated(3, 150).splitlines()
    assert lines[0].startswith("rank 0  F0a F1a F0b F1b F0c F1c .   .   B0c==   .")
    assert "a, b, ...: the chunk of the device" in lines[3]
    narrow = tabulated(3, 45).splitlines()
    assert narrow[0].startswith(
        "rank 0  FFffFF..B=.B=b="
    ) and "lower case: every other chunk of the device" in "".join(narrow)


def test_the_halves_of_a_pair_are_of_their_own_chunks() -> None:
    plan = compile_program(
        synthetic(stages=4, **UNITS), Strategy(Mesh(pp=2), recipes.dualpipe_v(pp=2, microbatches=4))
    ).plan
    text = schedule_table(simulate(plan).trace, plan, width=200)
    assert re.search(r"F\d&b\d", text) and re.search(r"f\d&B\d", text)


@each_case(("start", "shown"), [(16.0, "rank 0  F0 .  F1="), (14.0, "rank 0  F0 F1===")])
def test_a_column_shows_what_fills_most_of_it(start: float, shown: str) -> None:
    """Ten columns of 10.07 s: the second is idle for more than half of its time, or not."""
    spans = Span(0, "compute", 0, "c.F@0", 0.0, 10.0), Span(0, "compute", 1, "c.F@1", start, 100.7)
    assert schedule_table(Trace("k", "simulated", spans), width=40).startswith(shown)


def test_a_trace_without_compute() -> None:
    assert schedule_table(Trace("k", "simulated", ())) == "nothing is computed in this trace"


@given(
    st.integers(1, 5),
    st.integers(1, 12),
    st.floats(0.1, 10),
    st.floats(0.1, 10),
    st.integers(40, 200),
)
def test_no_line_is_wider_than_asked(
    pp: int, microbatches: int, forward: float, backward: float, width: int
) -> None:
    plan = samples.plan_of(pp=pp, microbatches=microbatches, F=forward, I=backward, W=backward)
    lines = schedule_table(simulate(plan).trace, plan, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.startswith("rank ") for line in lines) == pp


def test_a_picture_of_a_schedule(tmp_path: Path) -> None:
    plan = samples.plan()
    draw_schedule(samples.simulation().trace, tmp_path / "a.png", plan)
    draw_schedule(samples.simulation().trace, tmp_path / "b.png", plan)
    content = (tmp_path / "a.png").read_bytes()
    assert content.startswith(b"\x89PNG") and content == (tmp_path / "b.png").read_bytes()


def test_columns_lose_their_space_before_their_unit() -> None:
    """29 columns of one second do not fit into 72 characters with three each; with two they do."""
    plan = samples.plan_of(pp=2, microbatches=9, **UNITS)
    text = schedule_table(simulate(plan).trace, plan, width=80)
    assert (
        text.splitlines()[0].startswith("rank 0  F0F1. . B0= F2B1= F3B2= F4")
        and "a column is 1 s" in text
    )


def test_colours_of_a_terminal_change_no_letter() -> None:
    plan = samples.plan_of(pp=2, microbatches=4, **UNITS)
    text = schedule_table(simulate(plan).trace, plan, width=120, colour=True)
    assert "\x1b[30;48;5;75mF0\x1b[0m \x1b[30;48;5;75mF1\x1b[0m .  .  \x1b[30;48;5;214mB0=" in text
    assert re.sub(r"\x1b\[[0-9;]*m", "", text) == ONE_F_ONE_B


def colours(path: Path) -> Counter[tuple[int, ...]]:
    """Pixels of a picture by colour."""
    pixels = (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    return Counter(map(tuple, pixels.tolist()))


def test_later_chunks_are_paler_and_schedules_share_an_axis(tmp_path: Path) -> None:
    def planned(chunks: int) -> Plan:
        program = synthetic(stages=2 * chunks, F=1, I=1, W=1)
        return compile_program(
            program, Strategy(Mesh(pp=2), recipes.interleaved(pp=2, microbatches=2, chunks=chunks))
        ).plan

    drawings = []
    for chunks in (1, 2):
        plan = planned(chunks)
        drawings.append(Drawing(simulate(plan).trace, plan, f"{chunks} chunks"))
        draw_schedules(drawings[-1:], tmp_path / f"{chunks}.png")
    draw_schedules(drawings, tmp_path / "both.png")
    full, pale = (tuple(round(255 * x) for x in tint(PHASE_COLOURS["F"], s)) for s in (1.0, PALEST))
    one, two, both = (colours(tmp_path / name) for name in ("1.png", "2.png", "both.png"))
    assert one[full] and not one[pale] and two[full] and two[pale] > 0.3 * two[full]
    assert both[full] and sum(both.values()) > max(sum(one.values()), sum(two.values()))


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot write the schedule to .*: No such file"):
        draw_schedule(Trace("k", "simulated", ()), tmp_path / "none" / "a.png")
