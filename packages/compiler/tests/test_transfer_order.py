"""Transfers are posted in time, in one global order of all roles, and more are in flight where an order asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from packages.compiler.tests.canonical import makespan
from packages.compiler.tests.compile_cases import random_case
from packages.compiler.tests.test_lowering import ROW, planned
from piper_compiler import (
    Options,
    Strategy,
    compile_program,
    order,
    overlap,
    place,
    recipes,
    split,
    synthetic,
)
from piper_ir.ground.errors import PiperError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.plan.plan import COMPUTE
from piper_ir.program.ops import Recv, Send
from piper_ir.program.program import (
    Program,
)
from piper_ir.verify import check
from tests.helpers.cases import each_case


def test_empty_receives_are_posted_at_once_and_others_shortly_before_use() -> None:
    def ahead(program: Program, recv_ahead: int) -> list[int]:
        """Return for each receive on the last device how many compute instructions stand before its first reader."""
        options = Options(recv_ahead=recv_ahead)
        strategy = Strategy(Mesh(pp=3), recipes.gpipe(pp=3, microbatches=6))
        role = compile_program(program, strategy, options=options).plan.roles[2]
        out = []
        for k, instr in enumerate(role.program):
            if isinstance(instr.parts[0].op, Recv):
                value = instr.parts[0].writes[0]
                readers = (
                    n
                    for n, i in enumerate(role.program)
                    if any(value in p.reads for p in i.parts) and i.stream == COMPUTE
                )
                out.append(sum(i.stream == COMPUTE for i in role.program[k : next(readers)]))
        return out

    assert ahead(synthetic(stages=3, F=1, I=1, W=1), 2) == [0, 1, 2, 3, 4, 5], (
        "nothing stands before them"
    )
    sized = random_sized()
    assert ahead(sized, 2) == [0, 1, 2, 2, 2, 2]
    assert ahead(sized, 0) == [0] * 6


def random_sized() -> Program:
    program = synthetic(stages=3, F=1, I=1, W=1)
    chunks = []
    for c in program.chunks:
        ports = {
            p: ROW
            if p.startswith(("gin", "out", "tan")) and not (c.id == "stage2" and p != "gin0")
            else s
            for p, s in c.ports.items()
        }
        inputs = tuple(replace(i, spec=ROW) if i.kind == "value" else i for i in c.inputs)
        outputs = tuple(replace(o, spec=ROW) if o.kind == "value" else o for o in c.outputs)
        ports |= {"in0": inputs[0].spec}
        chunks.append(replace(c, ports=ports, inputs=inputs, outputs=outputs))
    return replace(program, chunks=tuple(chunks))


def test_all_roles_issue_the_transfers_of_one_global_order() -> None:
    """NCCL needs this: the k-th send of a channel and its receive stand at compatible places among all other
    transfers."""
    for seed in range(0, 60, 5):
        case = random_case(seed)
        plan = compile_program(
            case.program, case.strategy, global_batch=case.global_batch, training=case.training
        ).plan
        after: dict[str, set[str]] = {}
        for role in plan.roles:
            names = [transfer(i.parts[0]) for i in role.program if i.comm]
            for a, b in pairwise(names):
                after.setdefault(a, set()).add(b)
        seen: dict[str, int] = {}

        def acyclic(
            name: str, seen: dict[str, int] = seen, after: dict[str, set[str]] = after
        ) -> bool:
            if seen.get(name):
                return seen[name] == 2
            seen[name] = 1
            ok = all(acyclic(n) for n in after.get(name, ()))
            seen[name] = 2
            return ok

        assert all(acyclic(n) for n in list(after)), case.text


def transfer(part: object) -> str:
    """One name for both ends of a transfer, or all members of a reduction."""
    op, node = part.op, part.node  # type: ignore[attr-defined]  # a Part
    return node.split(".", 1)[1] if isinstance(op, Send | Recv) else node.rpartition("#")[0]


def test_the_default_order_keeps_both_chunks_of_a_v_busy() -> None:
    """V placement without an order: each device's two stages count as one way through the devices, not as a serial
    loop."""
    p, m = 4, 8
    places = (place(where(stage=s), on=dict(pp=min(s, 2 * p - 1 - s))) for s in range(2 * p))
    plan = planned(
        synthetic(stages=2 * p, F=1, I=1, W=1), split(where(), microbatches=m), *places, pp=p
    )
    busy = m * 2 * 3
    assert makespan(plan) < 1.5 * busy
    assert max(r.peak_bytes for r in plan.roles) <= 2 * p


def test_an_order_may_name_sends() -> None:
    """The sends of microbatches 2, 0, 1 of three, whose receives follow; and a send that is done before a forward."""
    program = synthetic(stages=2, F=1, I=1, W=1)
    sends = [where(op="send", stage=0, phase="F", mb=mb) for mb in (2, 0, 1)]
    first = recipes.pipeline(pp=2, microbatches=3)
    plan = planned(program, *first, order(*sends), pp=2)
    assert check(plan) == []
    for role, kind in zip(plan.roles, (Send, Recv), strict=True):
        parts = [i.parts[0] for i in role.program if isinstance(i.parts[0].op, kind)]
        assert [p.mb for p in parts] == [2, 0, 1]
    before = where(stage=0, phase="F", mb=1)
    waits = planned(program, *first, order(sends[1], before), pp=2).roles[0].program
    send, forward = (
        next(k for k, i in enumerate(waits) if i.parts[-1].mb == mb and i.comm is comm)
        for mb, comm in ((0, True), (1, False))
    )
    assert send < forward and any(stream != COMPUTE for stream, _ in waits[forward].waits)


@each_case(
    ("asked", "error"),
    [
        (
            lambda: order(where(op="recv", mb=1), where(op="recv", mb=0)),
            r"recv\.stage0.*: an order names no receives.* write op=\"send\" \[order condition 6\]",
        ),
        (
            lambda: order(where(mb=1), overlap(where(op="send", mb=0), where(stage=0, mb=0))),
            r"send\.stage0.*: an overlap is of compute.* \[order condition 6\]",
        ),
        (
            lambda: order(where(op="send", stage=0, mb=1), where(stage=0, phase="F", mb=1)),
            r"cyclic[^$]*stage0.F@1 on pp0 waits for send.stage0:out0@1#pp1 on pp0: ordered by",
        ),
        (
            lambda: (
                order(where(op="send", stage=0, mb=1), where(op="send", stage=0, mb=0)),
                order(where(stage=1, phase="F", mb=0), where(op="send", stage=1, mb=0)),
                order(where(op="send", stage=1, mb=0), where(stage=1, phase="F", mb=1)),
                order(where(stage=0, phase="B", mb=0), where(op="send", stage=0, mb=1)),
            ),
            r"cyclic[^$]*ordered by order\(where\(mb=",
        ),
        (
            lambda: order(where(op="all_reduce"), where(mb=0)),
            r"where\(op='all_reduce'\)",
        ),
    ],
)
def test_orders_of_communication_that_cannot_be_kept_are_refused(
    asked: Callable[[], object], error: str
) -> None:
    first = recipes.pipeline(pp=2, microbatches=2)
    asks = asked()
    more = asks if isinstance(asks, tuple) else (asks,)
    with pytest.raises(PiperError, match=error):
        planned(synthetic(stages=2, F=1, I=1, W=1), *first, *more, pp=2)


def test_an_order_elsewhere_may_ask_for_more_in_flight_than_the_default_allows() -> None:
    """Device 1 wants all forwards first; device 0 has no order and must give them."""
    directives = (
        *recipes.pipeline(pp=2, microbatches=5),
        order(where(stage=1, phase="F"), where(stage=1, phase="B")),
    )
    plan = planned(synthetic(stages=2, F=1, I=1, W=1), *directives, pp=2)
    assert [r.peak_bytes for r in plan.roles] == [5, 5]
