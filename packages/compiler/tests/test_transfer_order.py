"""Transfers are posted in time, in one global order of all roles, and more are in flight where an order asks for it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from packages.compiler.tests.canonical import makespan
from packages.compiler.tests.compile_cases import random_case
from packages.compiler.tests.test_lowering import ROW, planned
from piper_compiler import (
    Options,
    Strategy,
    compile_program,
    order,
    place,
    recipes,
    split,
    synthetic,
)
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.plan.plan import COMPUTE
from piper_ir.program.ops import Recv, Send
from piper_ir.program.program import (
    Program,
)


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


def test_an_order_elsewhere_may_ask_for_more_in_flight_than_the_default_allows() -> None:
    """Device 1 wants all forwards first; device 0 has no order and must give them."""
    directives = (
        *recipes.pipeline(pp=2, microbatches=5),
        order(where(stage=1, phase="F"), where(stage=1, phase="B")),
    )
    plan = planned(synthetic(stages=2, F=1, I=1, W=1), *directives, pp=2)
    assert [r.peak_bytes for r in plan.roles] == [5, 5]
