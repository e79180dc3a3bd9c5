"""Schedules as CSV files: what torch.distributed.pipelining writes we read, what we write it reads; contradictions are
named."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

from packages.compiler.tests.canonical import makespan
from packages.compiler.tests.random_orders import Rows, legal_orders, with_idle
from piper_compiler import (
    Schedule,
    Strategy,
    compile_program,
    read_schedule_csv,
    recipes,
    synthetic,
    write_schedule_csv,
)
from piper_compiler.actions import Action
from piper_compiler.interchange import parse_schedule
from piper_ir.ground.errors import FormatError, OutputError
from piper_ir.ground.mesh import Mesh
from piper_ir.plan.plan import Plan
from tests.helpers.cases import each_case

IDLE = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99)), max_size=4)


@given(legal_orders(), IDLE, st.sampled_from(("\n", "\r\n")))
def test_reading_gives_back_what_was_written(
    orders: Rows, idle: list[tuple[int, int]], newline: str
) -> None:
    rows = tuple(map(tuple, with_idle(orders, idle)))
    schedule = Schedule(rows, newline=newline)
    text = schedule.dumps()
    read = parse_schedule(text)
    assert read == schedule and read.dumps() == text
    assert [list(slots) for slots in read.orders] == orders
    lowered = read.with_communication()
    again = parse_schedule(lowered.dumps())
    assert again == lowered and again.dumps() == lowered.dumps() and again.lowered
    assert [list(slots) for slots in again.without_communication().orders] == orders


@settings(max_examples=25)
@given(legal_orders(most=4))
def test_directives_run_what_the_file_says(orders: Rows) -> None:
    schedule = Schedule.of_orders(orders)
    plan = planned(schedule)
    assert Schedule.of_plan(plan) == schedule
    lowered = Schedule.of_plan(plan, lowered=True)  # checked against what the compute needs
    assert lowered.orders == schedule.orders
    assert parse_schedule(lowered.dumps()) == lowered


def planned(schedule: Schedule) -> Plan:
    program = synthetic(stages=schedule.stages, F=1, I=1, W=1)
    return compile_program(
        program, Strategy(Mesh(pp=len(schedule.rows)), schedule.directives())
    ).plan


SET_ORDER = [  # torch reshards stage 4 before stage 3 at one place, in the order of a set
    *(
        [("F", 0, 1)],
        [("F", 1, 1)],
        [("F", 2, 1)],
        [("F", 3, 1)],
        [("F", 0, 0)],
        [("F", 4, 1)],
        [("B", 4, 1)],
        [("F", 0, 2)],
    ),
    *(
        [("F", 1, 0)],
        [("F", 2, 0)],
        [("F", 3, 0)],
        [("F", 1, 2), ("B", 3, 1)],
        [("B", 2, 1)],
        [("F", 4, 0), ("B", 1, 1)],
    ),
    *(
        [("F", 2, 2), ("B", 0, 1)],
        [("F", 3, 2), ("B", 4, 0)],
        [("F", 4, 2), ("B", 3, 0)],
        [("B", 2, 0)],
        [("B", 1, 0)],
    ),
    *([("B", 0, 0)], [("B", 4, 2)], [("B", 3, 2)], [("B", 2, 2)], [("B", 1, 2)], [("B", 0, 2)]),
]


@given(legal_orders())
@example([[tuple(Action(stage, phase, mb) for phase, stage, mb in slot) for slot in SET_ORDER]])
def test_communication_is_what_torch_adds(orders: Rows) -> None:
    schedule = Schedule.of_orders(orders)
    rows = {
        r: [torch_schedules._Action.from_str(cell) for cell in line.split(",")]
        for r, line in enumerate(lines(schedule))
    }
    home = torch_schedules._validate_schedule(
        rows, len(rows), schedule.stages, schedule.microbatches
    )
    lowered = {
        r: torch_schedules._add_reduce_grad(
            torch_schedules._add_unshard_reshard(row), schedule.microbatches
        )
        for r, row in rows.items()
    }
    theirs = torch_schedules._add_send_recv(lowered, home.__getitem__, schedule.stages)
    ours = [line.split(",") for line in lines(schedule.with_communication())]
    assert [*map(in_one_order, ours)] == [
        in_one_order([*map(str, theirs[r])]) for r in range(len(theirs))
    ]


def in_one_order(cells: list[str]) -> list[str]:
    """The cells, with neighbouring RESHARDs by stage: torch writes them in the order of a set."""
    groups = groupby(cells, key=lambda cell: cell.endswith("RESHARD"))
    return [cell for reshards, group in groups for cell in (sorted(group) if reshards else group)]


def lines(schedule: Schedule) -> list[str]:
    return schedule.dumps().splitlines()


def torch_orders(kind: str, pp: int, chunks: int, m: int) -> Any:
    """A schedule of torch's own, over stages that are only numbers."""
    common = dict(
        num_stages=pp * chunks, group_size=pp, group_rank=0, group=None, submod=nn.Identity()
    )
    stages = [SimpleNamespace(stage_index=s, **common) for s in range(chunks)]
    return getattr(torch_schedules, kind)(stages, m, loss_fn=lambda y, t: y)


TORCH = [
    ("ScheduleLoopedBFS", 4, 2, 6),
    ("ScheduleInterleaved1F1B", 4, 2, 8),
    ("ScheduleInterleaved1F1B", 2, 3, 4),
    ("ScheduleInterleavedZeroBubble", 4, 2, 8),
    ("ScheduleZBVZeroBubble", 4, 2, 8),
    ("ScheduleDualPipeV", 4, 2, 10),
]


@each_case(("kind", "pp", "chunks", "m"), TORCH)
def test_files_that_torch_writes(kind: str, pp: int, chunks: int, m: int, tmp_path: Path) -> None:
    theirs = torch_orders(kind, pp, chunks, m)
    for format, lowered in (("compute_only", False), ("compute_comms", True)):
        theirs._dump_csv(tmp_path / "theirs.csv", format=format)
        schedule = read_schedule_csv(tmp_path / "theirs.csv")
        assert (schedule.stages, schedule.microbatches, schedule.lowered) == (
            pp * chunks,
            m,
            lowered,
        )
        write_schedule_csv(schedule, tmp_path / "ours.csv")
        assert (tmp_path / "ours.csv").read_bytes() == (tmp_path / "theirs.csv").read_bytes()
        assert Schedule.of_plan(planned(schedule)).orders == schedule.orders


def test_torchs_dualpipev_takes_what_its_formula_says(tmp_path: Path) -> None:
    """4 devices, 10 microbatches, F = I = W = 1, O = 3: makespan 66, 9 activations."""
    torch_orders("ScheduleDualPipeV", 4, 2, 10)._dump_csv(tmp_path / "d.csv", format="compute_only")
    program = synthetic(stages=8, F=1, I=1, W=1, overlap=3)
    plan = compile_program(program, Strategy(Mesh(pp=4), recipes.from_csv(tmp_path / "d.csv"))).plan
    assert makespan(plan) == 66  # 60 of which every device is busy
    assert [role.peak_bytes for role in plan.roles] == [9] * 4


def test_a_strategy_and_a_plan_are_written(tmp_path: Path) -> None:
    strategy = Strategy(
        Mesh(pp=2, dp=2), (*recipes.one_f_one_b(pp=2, microbatches=2), *recipes.data_parallel())
    )
    compiled = compile_program(synthetic(stages=2, F=1, I=1, W=1), strategy)
    for source in (strategy, compiled, compiled.plan, Schedule.of_plan(compiled.plan)):
        write_schedule_csv(source, tmp_path / "s.csv")
        assert (tmp_path / "s.csv").read_text() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    write_schedule_csv(compiled, tmp_path / "s.csv", lowered=True)
    first, second = (tmp_path / "s.csv").read_text().splitlines()
    assert first == "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0RECV_B1,0B0,0B1,0REDUCE_GRAD"
    assert second == "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1REDUCE_GRAD,1SEND_B1"
    write_schedule_csv(read_schedule_csv(tmp_path / "s.csv"), tmp_path / "t.csv", lowered=False)
    assert (tmp_path / "t.csv").read_text().startswith("0F0,0F1,")


def test_two_way_pipelines_are_refused_by_name() -> None:
    orders = [
        [(Action(d if i == 0 else 1 - d, p, i),) for p in "FB" for i in (0, 1)] for d in (0, 1)
    ]
    with pytest.raises(
        FormatError,
        match=r"row 2 \(device 1\), cell 1: stage 1 is on device 0 already; .* \(DualPipe\)",
    ):
        Schedule.of_orders(orders)


SERIAL = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
LOWERED = (
    "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
    "1UNSHARD,1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD\n"
)


def changed(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, old
    return text.replace(old, new)


FAULTS: dict[str, tuple[str, str]] = {
    "no action": (
        changed(SERIAL, "1B0", "1X0"),
        r"row 2 \(device 1\), cell 2: '1X0' is not an action; accepted are 2F0",
    ),
    "the old name of B": (changed(SERIAL, "1B0", "1BW0"), "'1BW0' is not an action"),
    "no microbatch": (changed(SERIAL, "0F1", "0F"), "'0F' is not an action"),
    "two forwards": (
        "0F0,(0F1;0F2)OVERLAP_F_B\n",
        r"holds one forward and then one backward, not 0F1; 0F2",
    ),
    "an empty pair": ("()OVERLAP_F_B\n", "is not an action"),
    "empty": ("", "the table is empty"),
    "an empty line": (
        SERIAL + "\n",
        r"row 3 \(device 2\), cell 1: device 2 computes nothing; .* remove an empty line",
    ),
    "twice": (
        changed(SERIAL, "0F1", "0F0"),
        r"row 1 \(device 0\), cell 2: 0F0 stands in cell 1 of this row already",
    ),
    "a stage on two devices": (
        changed(SERIAL, "1F1,1B1", "0F1,0B1"),
        "stage 0 is on device 0 already",
    ),
    "a missing microbatch": (
        "0F0,0F2,0B0,0B2\n",
        "there is no microbatch 1; microbatches count from 0",
    ),
    "a missing stage": ("0F0,2F0,2B0,0B0\n", "there is no stage 1"),
    "no backward": (
        changed(SERIAL, ",1B1", ""),
        "stage 1 has 1F1 for microbatch 1; it needs one F and either one B or",
    ),
    "I without W": (changed(SERIAL, "1B1", "1I1"), "stage 1 has 1F1, 1I1 for microbatch 1"),
    "B and W": (changed(SERIAL, "1B1", "1B1,1W1"), "stage 1 has 1F1, 1B1, 1W1 for microbatch 1"),
    "backward first": (
        changed(SERIAL, "1F1,1B1", "1B1,1F1"),
        "cell 3: 1B1 stands before 1F1, whose results it needs",
    ),
    "W before I": ("0F0,0W0,0I0\n", "0W0 stands before 0I0"),
    "a forward with its own backward": ("(0F0;0B0)OVERLAP_F_B\n", "0B0 stands before 0F0"),
    "a cycle": (
        "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n",
        "wait for each other: device 0 at 0B0 for 1B0, in cell 4",
    ),
    "a quote": ('0F0,"0B0\n', "schedule is no CSV file"),
    "idle in a lowered file": (
        changed(LOWERED, "1B1,", "1B1,,"),
        "cell 9: this cell is empty, but a lowered schedule",
    ),
    "no receive": (
        changed(LOWERED, "1RECV_F1,", ""),
        "1F1 needs 1RECV_F1, which this device does not have",
    ),
    "no send": (changed(LOWERED, "0SEND_F1,", ""), "device 0 has no 0SEND_F1 for 1RECV_F1"),
    "a late receive": (
        changed(LOWERED, "0RECV_B1,0B1", "0B1,0RECV_B1"),
        "0B1 stands before 0RECV_B1",
    ),
    "an early send": (
        changed(LOWERED, "0F1,0SEND_F1", "0SEND_F1,0F1"),
        "0SEND_F1 stands before 0F1, whose results",
    ),
    "a transfer too many": (changed(LOWERED, "1B1,", "1B1,1SEND_F1,"), "1SEND_F1 carries nothing"),
    "a transfer of nothing": (
        changed(LOWERED, "1B1,", "1B1,1SEND_F7,"),
        "1SEND_F7 belongs to a stage or microbatch",
    ),
    "receives in the wrong order": (
        changed(LOWERED, "1RECV_F0,1F0,1RECV_F1", "1RECV_F1,1RECV_F0,1F0"),
        r"row 2 \(device 1\), cell 2: 1RECV_F1 stands before 1RECV_F0, whose message device 0 "
        r"sends first",
    ),
    "sends that wait": (
        changed(
            changed(LOWERED, "0F0,0SEND_F0,0F1,0SEND_F1", "0F0,0F1"),
            "0B0,",
            "0B0,0SEND_F0,0SEND_F1,",
        ),
        "wait for each other: device 0 at 0B0 for 1SEND_B0",
    ),
    "sharded": (
        changed(LOWERED, "1UNSHARD,1RECV_F0,1F0", "1RECV_F0,1F0,1UNSHARD"),
        "1F0 computes with parameters",
    ),
    "gathered twice": (
        changed(LOWERED, "0F0,", "0UNSHARD,0F0,"),
        "0UNSHARD gathers parameters that are gathered already; remove it",
    ),
    "given up twice": (
        changed(LOWERED, "0RESHARD", "0RESHARD,0RESHARD"),
        "0RESHARD frees parameters that no UNSHARD",
    ),
    "an early reduction": (
        changed(LOWERED, "0B1,0REDUCE_GRAD", "0REDUCE_GRAD,0B1"),
        "stands before the last backward",
    ),
    "reduced twice": (
        changed(LOWERED, "0RESHARD", "0REDUCE_GRAD,0RESHARD"),
        "reduces gradients that cell 10 has",
    ),
    "one without reduction": (
        changed(LOWERED, "1REDUCE_GRAD,", ""),
        "stage 1 has no REDUCE_GRAD after this",
    ),
}


@each_case("name", FAULTS)
def test_a_fault_is_named(name: str) -> None:
    text, message = FAULTS[name]
    with pytest.raises(FormatError, match=message):
        parse_schedule(text)


def test_what_the_faults_are_made_of_is_sound() -> None:
    assert parse_schedule(SERIAL).with_communication().dumps() == LOWERED
    assert not parse_schedule(SERIAL).lowered and parse_schedule(LOWERED).lowered


def test_an_error_shows_the_table_with_an_arrow(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,,(1F1;1X0)OVERLAP_F_B,1B1,1F2,1B2\n")
    with pytest.raises(FormatError) as caught:
        read_schedule_csv(path)
    head, *table = str(caught.value).splitlines()
    assert head.startswith(
        f"{path}: row 2 (device 1), cell 4: '(1F1;1X0)OVERLAP_F_B' is not an action"
    )
    assert table == [
        "",
        "          cell 1  cell 2  cell 3  cell 4                cell 5  cell 6  cell 7",
        "device 0  0F0     0F1     0F2     0B0                   0B1     0B2",
        "device 1  1F0     1B0             (1F1;1X0)OVERLAP_F_B  1B1     1F2     1B2",
        "                                  ^^^^^^^^^^^^^^^^^^^^ here",
    ]


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"cannot read the schedule .*none\.csv"):
        read_schedule_csv(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(FormatError, match="cannot read the schedule"):
        read_schedule_csv(tmp_path / "bytes.csv")
    with pytest.raises(OutputError, match="cannot write the schedule to"):
        write_schedule_csv(parse_schedule(SERIAL), tmp_path / "none" / "a.csv")


def test_a_strategy_without_stages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no partition, so its stages are not known"):
        write_schedule_csv(Strategy(Mesh(), ()), tmp_path / "a.csv")
