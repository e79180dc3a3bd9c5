"""What a span is: by plan, and by name."""

from collections.abc import Iterable

from packages.report.tests import samples
from piper_ir.ground.trace import Span, Trace
from piper_ir.plan.phases import instr_label
from piper_ir.plan.plan import Instr, Part
from piper_ir.program.ops import (
    Collective,
    Compute,
    Fold,
    Fresh,
    Load,
    Seed,
    SquaredNorm,
    Step,
    Update,
)
from piper_report.facts.phases import kinds
from tests.helpers.cases import each_case


def instr(*steps: tuple[Step, int], first: Iterable[Part] = ()) -> Instr:
    return Instr(
        "compute", (*first, *(Part(f"c.{s}@{mb}", Compute("c", s), mb) for s, mb in steps))
    )


@each_case(
    ("made", "label", "phase"),
    [
        (instr(("F", 2), first=[Part("load@2", Load("x"), 2)]), "F2", "F"),
        (instr(("I", 1), ("W", 1), first=[Part("seed@1", Seed(1.0, "float32"), 1)]), "B1", "B"),
        (instr(("I", 1), ("I", 1)), "I1", "I"),
        (instr(("W", 0)), "W0", "W"),
        (instr(("I", 0), ("F", 3), ("W", 0)), "F3&B0", "pair"),
        (instr(("F", 3), ("W", 0)), "F3&W0", "pair"),
        (instr(("F", 0), ("F", 1)), "F0", "F"),
        (
            Instr(
                "compute",
                (Part("norm", SquaredNorm(("b",), "float32")), Part("update", Update(("b",)))),
            ),
            "U",
            "U",
        ),
        (Instr("compute", (Part("norm", SquaredNorm(("b",), "float32")),)), "", "other"),
        (Instr("compute", (Part("fold", Fold("b"), 1), Part("fresh", Fresh("c"), 2))), "1", "fold"),
        (
            Instr(
                "compute", (Part("fold", Fold("b")), Part("norm", SquaredNorm(("b",), "float32")))
            ),
            "",
            "other",
        ),
        (instr(("W", 3), first=[Part("fresh@3", Fresh("b"), 3)]), "W3", "W"),
        (Instr("gather", (Part("gather", Collective("all_gather", "g", "b"), 2),)), "2", "gather"),
        (Instr("scatter", (Part("scatter", Collective("reduce_scatter", "s")),)), "", "scatter"),
        (Instr("reduce", (Part("reduce", Collective("all_reduce", "r", "b")),)), "", "comm"),
    ],
)
def test_of_an_instruction(made: Instr, label: str, phase: str) -> None:
    assert (instr_label(made).label, instr_label(made).phase) == (label, phase)


@each_case(
    ("made", "label", "again"),
    [
        (instr(("R", 1), ("I", 1), ("W", 1)), "B1", True),
        (instr(("R", 1), ("I", 1)), "I1", True),
        (instr(("R", 1)), "R1", False),
        (instr(("I", 1), ("W", 1)), "B1", False),
        (instr(("F", 2), ("R", 0), ("I", 0), ("W", 0)), "F2&B0", True),
    ],
)
def test_a_backward_may_begin_with_recomputation(made: Instr, label: str, again: bool) -> None:
    assert (instr_label(made).label, instr_label(made).again) == (label, again)


@each_case(
    ("stream", "name", "phase", "mb"),
    [
        ("compute", "load.inputs@3#pp0+4", "F", 3),
        ("compute", "seed.root.1:tan0@12#pp1+8", "B", 12),
        ("compute", "layer2.I@0+6", "B", 0),
        ("compute", "layer2.I@0", "I", 0),
        ("compute", "layer2.W@1+2", "W", 1),
        ("compute", "update#pp0", "U", -1),
        ("compute", "norm#pp0", "other", -1),
        ("pp0>pp1.act", "send.layer2:out0@5#pp1", "comm", 5),
        ("reduce", "reduce.bucket4#pp0", "comm", -1),
        ("gather", "gather.bucket4#pp0.layer1.F@2", "gather", 2),
        ("scatter", "scatter.bucket4#pp0.layer1.W@2", "scatter", 2),
        ("compute", "fold.bucket4#pp0.layer1.W@2", "fold", 2),
    ],
)
def test_of_a_name(stream: str, name: str, phase: str, mb: int) -> None:
    (found,) = kinds(Trace("k", "executed", (Span(0, stream, 0, name, 0.0, 1.0),))).values()
    assert (found.phase, found.mb) == (phase, mb)


def test_plan_and_name_agree_where_a_name_can_tell() -> None:
    trace = samples.simulation().trace
    assert kinds(trace) == kinds(trace, samples.plan())
