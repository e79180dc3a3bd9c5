"""Tables of schedules in torch's format, of plans whose ranks share parameters: whole stages, or a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

import piper
from benchmarks.gathers import Order, counted, order_of, plan_of
from piper_compiler.interchange import Schedule
from piper_ir.ground.errors import FormatError
from piper_ir.plan.plan import Plan
from tests.helpers import compositions
from tests.helpers.compositions import Composition

PAIR: Order = order_of("interleaved, v=2", 2, 4)


def rows(plan: Plan) -> list[str]:
    """The rows of the lowered table, without transfers."""
    text = Schedule.of_plan(plan, lowered=True).dumps()
    return [
        ",".join(cell for cell in row.split(",") if "SEND" not in cell and "RECV" not in cell)
        for row in text.splitlines()
    ]


def test_windows_of_whole_stages_are_written() -> None:
    first, _ = rows(plan_of(PAIR, 1, 0))
    assert first.startswith("0UNSHARD,0F0,0F1,0RESHARD,2UNSHARD,2F0,2F1,2RESHARD,0UNSHARD,0F2,")
    assert first.endswith(",0B3,0RESHARD,0REDUCE_GRAD") or first.endswith(
        ",0B3,0REDUCE_GRAD,0RESHARD"
    )
    assert first.count("UNSHARD") == first.count("RESHARD") > 4 and first.count("REDUCE_GRAD") == 2


def test_there_are_as_many_as_the_plan_gathers() -> None:
    found = counted("interleaved, v=2", 2, 4, 1, 1)
    assert max(row.count("UNSHARD") for row in rows(plan_of(PAIR, 1, 0))) == found.ours


def test_what_is_kept_for_the_step_is_gathered_once() -> None:
    for layers in (1, 2):
        assert [row.count("UNSHARD") for row in rows(plan_of(PAIR, layers, None))] == [2, 2]


def test_a_gather_ahead_stands_before_the_actions_that_it_passes() -> None:
    first, _ = rows(plan_of(PAIR, 1, 0, prefetch=1))
    assert first.startswith("0UNSHARD,0F0,2UNSHARD,0F1,0RESHARD,2F0,")


def test_parameters_that_are_gathered_in_place_stay_to_the_end() -> None:
    c = Composition("gpt_untied", 2, 2, 2, "1f1b", zero=1)
    for device, row in enumerate(rows(compositions.compiled(c).plan)):
        assert (
            row.startswith(f"{device}UNSHARD,{device}F0,")
            and row.endswith(f"{device}RESHARD")
            and row.count("UNSHARD") == 1
        )


def test_windows_of_parts_of_a_stage_are_refused_by_name(tmp_path: Path) -> None:
    plan = plan_of(PAIR, 2, 0)
    with pytest.raises(
        FormatError,
        match=r"pp0 does not gather stage \d as a whole: bucket\d+ .*resident_mb=\"step\"",
    ):
        rows(plan)
    piper.write_schedule_csv(plan, tmp_path / "compute.csv")
    assert "UNSHARD" not in (tmp_path / "compute.csv").read_text()


def test_weight_gradients_without_parameters_are_refused_by_name() -> None:
    with pytest.raises(
        FormatError,
        match=r"pp\d does not gather stage \d as a whole: \dW\d runs without its parameters",
    ):
        rows(plan_of(order_of("interleaved zero bubble, v=2", 2, 4), 1, 0))


def test_several_scatters_of_a_bucket_are_refused_by_name() -> None:
    c = Composition("gpt_untied", 2, 2, 2, "1f1b", zero=2, bucket_mb=0.002)
    with pytest.raises(
        FormatError,
        match=r"scatters the gradients of bucket\d+ 2 times in a step.*reduced_mb=\"step\"",
    ):
        rows(compositions.compiled(c).plan)


def test_a_bucket_of_two_stages_is_refused_by_name() -> None:
    c = Composition("gpt", 1, 2, 2, "interleaved", zero=3, reduced_mb="step", resident_mb="step")
    with pytest.raises(
        FormatError,
        match=r"gathers bucket\d+ for stages 0, 1; the format gathers each stage by itself",
    ):
        rows(compositions.compiled(compositions.fitted(c)).plan)
