"""A plan's text comes back as the same plan, and bad text names the line."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from packages.ir.tests.documents_for_tests import documents
from packages.ir.tests.plans_for_tests import good_plan
from piper_ir.ground.errors import FormatError
from piper_ir.plan.plan import Plan
from piper_ir.plan.text import format_plan, parse_plan

GOOD = good_plan()
TEXT = format_plan(GOOD)
LINES = TEXT.split("\n")


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(documents(Plan))
def test_any_plan_comes_back_equal(plan: Plan) -> None:
    text = format_plan(plan)
    assert parse_plan(text) == plan
    assert format_plan(parse_plan(text)) == text


def test_one_line_per_instruction_that_reads_well() -> None:
    assert parse_plan(TEXT) == GOOD
    assert (
        "   8 compute W embed @0 reads s@0 ga@0#pp0 gb@0#pp0 frees s@0 ga@0#pp0 gb@0#pp0 | waits "
        "recv#2 send#2 frees "
        "a@0 b@0" in LINES
    )
    assert "   4 send    Send act @1 node send.a@1 reads a@1 | waits compute#2" in LINES
    assert "value a@0 activation float32[2,8]" in LINES
    update = next(line for line in LINES if "Update tied own" in line)
    assert update.startswith(
        "  16 compute Update tied own clip 1.0 node update reads norm#pp1 frees norm#pp1 | waits "
        "reduce#3 send#4 frees"
    )
    tables = ("param", "buffer", "batch", "chunk", "channel", "bucket", "value", "role")
    count = sum(
        map(
            len,
            (
                GOOD.params,
                GOOD.buffers,
                GOOD.batch,
                GOOD.chunks,
                GOOD.channels,
                GOOD.buckets,
                GOOD.values,
                GOOD.roles,
            ),
        )
    )
    assert sum(line.split(" ")[0] in tables for line in LINES) == count
    assert sum(line.strip()[:1].isdecimal() for line in LINES) == sum(
        len(r.program) for r in GOOD.roles
    )


def test_comments_and_empty_lines_are_skipped() -> None:
    assert parse_plan("# a plan\n\n" + TEXT.replace("\n", "\n\n  # remark\n")) == GOOD


def test_one_changed_word_is_another_plan() -> None:
    changed = parse_plan(TEXT.replace("| waits compute#5", "| waits compute#4"))
    assert changed != GOOD
    assert changed == parse_plan(format_plan(changed))


def _edit(old: str, new: str) -> str:
    assert old in TEXT
    return TEXT.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (_edit("piper plan 1", "piper plan 9"), "piper plan 9", "line 1: the first line must be "
                                                                "'piper plan 1'"),
        (_edit("value a@0 activation", "value a@0 colour"), "value a@0 colour", "category: 'colour' is not one of "
                                                                                "'param',"),
        (_edit("activation float32[2,8]", "activation float32"), "float32", "float32 is not a "
                                                                            "dtype[shape], such as "
                                                                            "float32[2"),
        (_edit("activation float32[2,8]", "activation float31[2,8]"), "float31", "unknown dtype "
                                                                                 "'float31'"),
        (_edit("value b@0 ", "value a@0 "), "value a@0", "there are two values a@0"),
        (_edit("value b@0 activation "
               "float32[2,8]", "value b@0"), "value b@0", "its category is expected at the end"),
        (_edit("W embed @0", "Z embed @0"), "Z embed @0", "Z is no op; the ops are F, B, R, I, W, "
                                                          "Load, Seed, Add"),
        (_edit("W embed @0", "W @0"), "W @0", "a chunk is expected before @0"),
        (_edit("W embed @0", "W embed @x"), "W embed @x", "a microbatch such as @3 is expected, "
                                                          "found 'x'"),
        (_edit("recv#2 send#2", "recv send#2"), "recv send#2", "recv is not a wait; stream#count "
                                                               "is expected, such as "
                                                               "compute#3"),
        (_edit("recv#2 send#2", "recv#two send#2"), "recv#two", "a number of instructions of recv "
                                                                "is expected, found "
                                                                "'two'"),
        (_edit("| waits recv#2", "| colour red waits "
                                 "recv#2"), "| colour", "waits, frees, allocs, takes or the end of "
                                                        "the line"),
        (_edit("reads s@0 ga@0#pp0", "reads s@0 reads "
                                     "ga@0#pp0"), "s@0 reads", "or the end of the line is expected "
                                                               "before reads"),
        (_edit("   8 compute", "   9 compute"), "9 compute W", "instruction 8 of role pp0 is "
                                                               "expected here"),
        (_edit("clip 1.0", "clip one"), "clip one", "a number is expected, found 'one'"),
        (_edit("node update", "node up date"), "node up date", "one name is expected after node, "
                                                               "found 2"),
        (_edit("AllReduce tied "
               "tied", "AllReduce tied tied own"), "tied own", "at most one bucket, found 2"),
        (_edit('{"id":"act"', '{"id":3'), 'channel {"id":3', "channel.id: a string is expected, "
                                                             "found the number 3"),
        (_edit('{"id":"act",', '{"id":"act" '), 'channel {"id":"act"', "not JSON: Expecting ',' "
                                                                       "delimiter at column "
                                                                       "13"),
        (_edit("role pp0 {", "roll pp0 {"), "roll pp0", "starts with one of plan, param, buffer, "
                                                        "batch, chunk, "
                                                        "variant, "),
        (_edit('node load@0', 'node "load@0'), 'node "load@0', "a quotation mark without its end"),
        (TEXT + "role pp7 {}\n", "role pp7", "nothing is expected after the line `end`"),
        ("piper plan 1\n 0 compute "
         "Add\n", "0 compute Add", "an instruction needs a line `role` before it"),
    ],
    ids=range(23),
)  # fmt: skip
def test_bad_text_names_the_line_and_what_is_expected(text: str, line: str, message: str) -> None:
    with pytest.raises(FormatError) as error:
        parse_plan(text, "saved.plan")
    stated = str(error.value)
    number = int(stated.split("line ")[1].split(":")[0])
    assert stated.startswith(f"saved.plan, line {number}: ")
    assert message in stated
    assert line in text.split("\n")[number - 1] and line in stated


@pytest.mark.parametrize("kept", [1, 2, 20, len(LINES) - 2])
def test_text_cut_at_a_line_is_called_truncated(kept: int) -> None:
    with pytest.raises(FormatError, match="is it truncated"):
        parse_plan("\n".join(LINES[:kept]))


def test_bad_heads_name_the_line_of_the_head() -> None:
    with pytest.raises(FormatError, match="role pp0: unknown key 'color' in RolePlan"):
        parse_plan(_edit("role pp0 {", 'role pp0 {"color":1,'))
    with pytest.raises(FormatError, match=r"line `plan`\.rows: an integer is expected"):
        parse_plan(_edit('"rows":2', '"rows":"2"'))
