"""Each rule of `verify` finds the one thing that is wrong in a plan: names, buffers, waits and messages.

The rules on training are in test_training_rules.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packages.ir.tests.breaks import Breaks
from packages.ir.tests.documents_for_tests import documents
from packages.ir.tests.plans_for_tests import (
    SCALAR,
    change_bucket,
    change_channel,
    change_instr,
    change_part,
    change_program,
    change_role,
    find,
    good_plan,
    lone_plan,
)
from packages.ir.tests.test_collective_rules import breaks as collective_breaks
from packages.ir.tests.test_recompute_rules import breaks as recompute_breaks
from packages.ir.tests.test_sharing_rules import breaks as sharing_breaks
from packages.ir.tests.test_training_rules import breaks as training_breaks
from piper_ir.fold.memory import with_peaks
from piper_ir.ground.errors import PlanError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.shards import Shards
from piper_ir.ground.sizes import Affine, TensorSpec
from piper_ir.plan.plan import Instr, Plan, State
from piper_ir.program.ops import Collective, Compute, Recv
from piper_ir.verify import RULES, check, verify
from piper_ir.verify.columns import HappensBefore

GOOD = good_plan()
breaks = Breaks(GOOD)

breaks("R01-ranks", "no role has rank 1")(lambda plan: change_role(plan, "pp0", ranks=(0,)))
breaks("R01-ranks", "outside of Mesh(pp=2, dp=2)")(
    lambda plan: change_role(plan, "pp1", placed={"pp": 2})
)
breaks("R02-streams", "the role has the streams compute, send, recv, reduce")(
    lambda plan: change_instr(plan, "pp0", "send.a@0", stream="ghost")
)
breaks("R02-streams", "streams are compute, send, recv, reduce, send")(
    lambda plan: change_role(plan, "pp0", streams=("compute", "send", "recv", "reduce", "send"))
)
breaks("R03-parts", "a communication has one")(
    lambda plan: change_instr(plan, "pp0", "send.a@0", parts=2 * plan.role("pp0").program[1].parts)
)
breaks("R03-parts", "it has no part")(lambda plan: change_instr(plan, "pp0", "zero", parts=()))
breaks("R04-allocation", "stream send allocates or frees")(
    lambda plan: change_part(plan, "pp0", "send.a@0", frees=("a@0",))
)
breaks("R05-waits", "it waits for 3 instructions of compute, of which 2 stand before it")(
    lambda plan: change_instr(plan, "pp0", "send.a@1", waits=(("compute", 3),))
)
breaks("R05-waits", "it waits for the stream copy; the role has compute, send, recv, reduce")(
    lambda plan: change_instr(plan, "pp0", "send.a@1", waits=(("compute", 2), ("copy", 1)))
)
breaks("R05-waits", "it waits for 0 instructions")(
    lambda plan: change_instr(plan, "pp0", "send.a@1", waits=(("compute", 2), ("recv", 0)))
)
breaks("R06-names", "there is no value ghost in the plan")(
    lambda plan: change_part(plan, "pp0", "send.a@0", reads=("ghost",))
)
breaks("R06-names", "there is no value ghost in the plan, to be allocated first")(
    lambda plan: change_role(plan, "pp1", allocs_first=("a@0#pp1", "b@0#pp1", "ghost"))
)
breaks("R06-names", "there is no chunk ghost")(
    lambda plan: change_part(plan, "pp0", "embed.F@0", op=Compute("ghost", "F"))
)
breaks("R06-names", "2 chunks are called head")(
    lambda plan: replace(plan, chunks=(*plan.chunks, plan.chunks[1]))
)
breaks("R06-names", "bucket own names parameter ghost")(
    lambda plan: change_bucket(plan, "own", params=("ghost",))
)


@breaks("R06-names", "input 0 of chunk head is the value embed:out7")
def _unknown_input(plan: Plan) -> Plan:
    head = plan.chunks[1]
    inputs = (replace(head.inputs[0], ref="embed:out7"), *head.inputs[1:])
    return replace(plan, chunks=(plan.chunks[0], replace(head, inputs=inputs)))


@breaks("R06-names", "W of chunk head uses accumulator 3, which the chunk does not have")
def _accumulates_targets(plan: Plan) -> Plan:
    head = plan.chunks[1]
    steps = {**head.steps, "W": replace(head.steps["W"], accumulates=(3, 5))}
    return replace(plan, chunks=(plan.chunks[0], replace(head, steps=steps)))


@breaks("R06-names", "F of chunk head uses in9, inn0, saved7, which the chunk does not have")
def _unknown_ports(plan: Plan) -> Plan:
    head = plan.chunks[1]
    steps = {
        **head.steps,
        "F": replace(head.steps["F"], reads=("in0", "in9", "inn0"), writes=("out0", "saved7")),
    }
    return replace(plan, chunks=(plan.chunks[0], replace(head, steps=steps)))


@breaks("R07-signature", "value x@0 is a int64[2r]; in a plan all sizes are integers from 0")
def _size_in_rows(plan: Plan) -> Plan:
    spec = TensorSpec((Affine(0, 2),), "int64")
    return replace(plan, values={**plan.values, "x@0": replace(plan.values["x@0"], spec=spec)})


breaks("R07-signature", "it writes a@0, a float32[]; float32[2,8] is expected")(
    lambda plan: replace(
        plan, values={**plan.values, "a@0": replace(plan.values["a@0"], spec=SCALAR)}
    )
)
breaks("R07-signature", "it reads 2 values; 3 are expected")(
    lambda plan: change_part(plan, "pp0", "embed.W@0", reads=("s@0", "ga@0#pp0"))
)
breaks("R07-signature", "microbatch 2 is not in 0..1")(
    lambda plan: change_part(plan, "pp0", "embed.F@0", mb=2)
)
breaks("R07-signature", "the step B does not exist in a plan")(
    lambda plan: change_part(plan, "pp1", "head.I@0", op=Compute("head", "B"))
)
breaks("R08-states", "it uses grad:tied and has no such state")(
    lambda plan: change_role(
        plan, "pp0", states=tuple(s for s in plan.role("pp0").states if s.id != "grad:tied")
    )
)


@breaks("R08-states", "the state buffer:scale has 33 bytes; 32 are expected")
def _wrong_bytes(plan: Plan) -> Plan:
    states = plan.role("pp0").states
    return change_role(plan, "pp0", states=(*states[:-1], replace(states[-1], nbytes=33)))


breaks("R08-states", "it has the state param:tied 2 times")(
    lambda plan: change_role(
        plan, "pp0", states=(plan.role("pp0").states[0], *plan.role("pp0").states)
    )
)


@breaks(
    "R30-shards",
    "is replicated along ('dp',) and shared along Shards(params=(), grads=(), optim=('pp',))",
)
def _shared_along_another_axis(plan: Plan) -> Plan:
    first, *others = plan.buckets
    return replace(plan, buckets=(replace(first, shard=Shards(optim=("pp",))), *others))


breaks("R09-channels", "role pp0 has no communication stream compute")(
    lambda plan: change_channel(plan, "act", streams=("compute", "recv"))
)
breaks("R09-channels", "p2p needs a source and a destination")(
    lambda plan: change_channel(plan, "act", roles=("pp0",), streams=("send",))
)
breaks(
    "R09-channels", "its sms are (8,); per role none or a number that is not negative is expected"
)(lambda plan: change_channel(plan, "act", sms=(8,)))
breaks("R09-channels", "its sms are (8, -1)")(lambda plan: change_channel(plan, "act", sms=(8, -1)))


@breaks("R09-channels", "its roles place different axes")
def _channel_across(plan: Plan) -> Plan:
    roles = (plan.roles[0], replace(plan.roles[1], placed={"dp": 1, "pp": 1}, ranks=(3,)))
    return replace(
        plan,
        mesh=Mesh(pp=2, dp=2),
        roles=(*roles, replace(roles[1], role="rest", placed={"dp": 0, "pp": 1}, ranks=(2,))),
    )


breaks("R10-channel-use", "channel act delivers to role pp1")(
    lambda plan: change_part(plan, "pp0", "recv.ga@0", op=Recv("act"))
)
breaks("R10-channel-use", "channel grad is p2p; AllReduce needs group")(
    lambda plan: change_part(plan, "pp0", "reduce.norm", op=Collective("all_reduce", "grad"))
)
breaks("R10-channel-use", "channel own joins pp1")(
    lambda plan: change_part(plan, "pp0", "reduce.tied", op=Collective("all_reduce", "own", "tied"))
)


@breaks("R10-channel-use", "channel tied uses the stream reduce here")
def _other_stream(plan: Plan) -> Plan:
    program = plan.role("pp0").program
    at = find(plan, "pp0", "reduce.tied")
    moved = replace(program[at], stream="recv")
    later = replace(program[-1], waits=(("recv", 5), ("reduce", 1)))
    return change_role(plan, "pp0", program=(*program[:at], moved, *program[at + 1 : -1], later))


breaks("R11-written-once", "nothing writes t@1")(
    lambda plan: change_part(plan, "pp1", "load.t@1", writes=("t@0",))
)
breaks("R11-written-once", "it uses squares, which lives on role pp1")(
    lambda plan: change_part(plan, "pp0", "reduce.norm", reads=("squares",))
)
breaks("R12-allocated", "it must stand before, and be waited for")(
    lambda plan: change_instr(plan, "pp1", "recv.a@1", waits=())
)
breaks("R12-allocated", "allocated 0 times")(
    lambda plan: change_instr(plan, "pp1", "head.F@0", allocs_after=("a@1#pp1",))
)
breaks(
    "R12-allocated", "is allocated by the part that writes it, and by the start of the step too"
)(lambda plan: change_role(plan, "pp0", allocs_first=("a@0",)))


@breaks("R13-read-after-write", "no wait makes this instruction come after it")
def _read_too_early(plan: Plan) -> Plan:
    return change_instr(plan, "pp1", "head.F@0", waits=())


@breaks("R13-read-after-write", "writes only later")
def _parts_swapped(plan: Plan) -> Plan:
    seed, first, second, total = plan.role("pp1").program[find(plan, "pp1", "head.I@0")].parts
    parts = (
        seed,
        replace(second, frees=()),
        replace(first, frees=("seed@0", "h@0", "iw@0")),
        total,
    )
    return change_instr(plan, "pp1", "head.I@0", parts=parts)


breaks("R14-freed-once", "loss@1 is written here and never freed")(
    lambda plan: change_part(plan, "pp1", "head.F@1", frees=("a@1#pp1", "b@1#pp1", "t@1"))
)
breaks("R14-freed-once", "it frees s@0, which")(
    lambda plan: change_instr(plan, "pp0", "embed.W@1", frees_before=("a@1", "b@1", "s@0"))
)


@breaks(
    "R15-use-after-free", "it uses a@0, which instruction 0 (compute: embed.F@0+1) frees before"
)
def _sent_after_free(plan: Plan) -> Plan:
    early = change_part(plan, "pp0", "embed.F@0", frees=("x@0", "a@0"))
    return change_instr(early, "pp0", "embed.W@0", frees_before=("b@0",))


@breaks("R15-use-after-free", "it uses h@0, which")
def _read_after_free(plan: Plan) -> Plan:
    early = change_part(plan, "pp1", "head.I@0", frees=("seed@0", "h@0"))
    return change_part(early, "pp1", "head.W@0", frees=("iw@0",))


breaks("R16-free-covered", "it frees a@0 without having waited for instruction 1 (send: send.a@0)")(
    lambda plan: change_instr(plan, "pp0", "embed.W@0", waits=(("recv", 2),))
)


@breaks("R17-p2p-match", "channel act: role pp0 sends 5 times, role pp1 receives 4 times")
def _one_send_more(plan: Plan) -> Plan:
    def edit(program: list[Instr]) -> None:
        last = find(plan, "pp0", "embed.W@1")
        program[last] = replace(program[last], waits=(("recv", 4), ("send", 5)))
        program.insert(5, program[5])

    return change_program(plan, "pp0", edit)


@breaks(
    "R17-p2p-match", "number 0 on channel grad is float32[] on role pp1, float32[2,8] on role pp0"
)
def _wrong_shape_sent(plan: Plan) -> Plan:
    sent = change_part(plan, "pp1", "send.ga@0", reads=("seed@0",))
    kept = change_part(sent, "pp1", "head.I@0", frees=())
    update = plan.role("pp1").program[-1]
    return change_instr(kept, "pp1", "update", frees_before=(*update.frees_before, "seed@0"))


breaks(
    "R18-group-match",
    "number 0 on channel tied is AllReduce of bucket tied on role pp0, AllReduce of bucket own on role pp1",
)(lambda plan: change_part(plan, "pp1", "reduce.tied", op=Collective("all_reduce", "tied", "own")))


@breaks("R19-deadlock", "pp0[5] embed.F@1+1 on compute waits for pp0[4] recv.gb@0")
def _deadlock(plan: Plan) -> Plan:
    """Let pp0 want the gradient of microbatch 0 before its second forward, while pp1 runs both forwards first."""

    def edit(program: list[Instr]) -> None:
        receives = [replace(program.pop(6), waits=(("compute", 1),)) for _ in range(2)]
        program[0] = replace(program[0], allocs_after=("ga@0#pp0", "gb@0#pp0"))
        program[3] = replace(
            program[3], allocs_after=("ga@1#pp0", "gb@1#pp0"), waits=(("recv", 2),)
        )
        program[3:3] = receives

    return change_program(plan, "pp0", edit)


@breaks("R20-issue-order", "if each rank runs its communications one by one")
def _crossed(plan: Plan) -> Plan:
    """Let pp0 issue its receives of gradients before the sends of activations that those gradients need."""

    def edit(program: list[Instr]) -> None:
        program[4:8] = [*program[6:8], *program[4:6]]

    return change_program(plan, "pp0", edit)


breaks("R07-signature", "update: it is an op of the whole step, and names the microbatch 1")(
    lambda plan: change_part(plan, "pp0", "update", mb=1)
)
breaks("R07-signature", "squares: it is an op of the whole step, and names the microbatch 0")(
    lambda plan: change_part(plan, "pp1", "squares", mb=0)
)
breaks("R07-signature", "reduce.own: it is an op of the whole step, and names the microbatch 1")(
    lambda plan: change_part(plan, "pp1", "reduce.own", mb=1)
)
breaks("R07-signature", "send.a@0: microbatch 2 is not in -1..1")(
    lambda plan: change_part(plan, "pp0", "send.a@0", mb=2)
)
breaks("R07-signature", "the plan has 0 rows in a microbatch; at least one is needed")(
    lambda plan: replace(plan, rows=0)
)
breaks("R07-signature", "the plan has 0 microbatches; at least one is needed")(
    lambda plan: replace(plan, microbatches=0)
)


@breaks("R08-states", "the state optim:ghost has 512 bytes; the plan has no such tensor")
def _optimizer_of_no_bucket(plan: Plan) -> Plan:
    states = tuple(
        replace(s, name="ghost") if s.id == "optim:own" else s for s in plan.role("pp1").states
    )
    return with_peaks(change_role(plan, "pp1", states=states))


breaks("R08-states", "it has the state optim:own of a bucket that it does not use")(
    lambda plan: with_peaks(
        change_role(
            plan, "pp0", states=(*plan.role("pp0").states, State("optim", "own", 512, True))
        )
    )
)


def test_the_good_plans_are_good() -> None:
    for plan in (GOOD, lone_plan()):
        assert check(plan) == []
        verify(plan)


def test_one_fault_breaks_one_rule() -> None:
    breaks.check()


def test_every_rule_has_a_negative_control() -> None:
    elsewhere = {
        "R31-gathered",
        "R32-contributions",
        "R37-experts",
        "R38-host",
    }  # test_sharding.py, test_experts_faults.py and test_offload.py of tests/
    lists = (breaks, collective_breaks, recompute_breaks, sharing_breaks, training_breaks)
    assert set().union(elsewhere, *(b.rules for b in lists)) == set(RULES)


def test_verify_names_rule_role_ranks_instruction_and_stream() -> None:
    with pytest.raises(PlanError) as error:
        verify(_read_too_early(GOOD))
    text = str(error.value)
    assert (
        "R13-read-after-write: role pp1 (ranks 2, 3), instruction 2 on compute: head.F@0+1: it reads a@0#pp1"
        in text
    )
    assert "instruction 0 (recv: recv.a@0)" in text
    assert RULES["R13-read-after-write"] in text
    assert "2 more violations" in text


def test_a_deadlock_is_shown_as_a_cycle_of_waiting() -> None:
    (found,) = check(_deadlock(GOOD))
    _, *lines = found.message.split("\n")
    event = r"(\w+\[\d+\] \S+ on \w+)"
    waiting = [re.fullmatch(f"  {event} (.*) {event}", line) for line in lines]
    chain = [(m[1], m[3]) for m in waiting if m]
    assert len(chain) == len(lines) >= 4
    assert [needed for _, needed in chain] == [waiter for waiter, _ in chain[1:] + chain[:1]]
    assert {m[2] for m in waiting if m} <= {
        "waits for",
        "meets",
        "is issued after",
        "is next on its stream after",
    }


def test_order_is_transitive_and_ignores_program_order_across_streams() -> None:
    order = HappensBefore(GOOD.role("pp0"))
    first, sent, received, last = (
        find(GOOD, "pp0", n) for n in ("embed.F@0", "send.b@0", "recv.ga@1", "update")
    )
    assert (
        order.precedes(first, sent)
        and order.precedes(first, last)
        and order.precedes(received, last)
    )
    assert (
        not order.precedes(sent, received)
        and not order.precedes(last, first)
        and not order.precedes(first, first)
    )


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_plan_that_makes_no_sense_is_refused_and_does_not_crash(data: st.DataObject) -> None:
    """Turn one field anywhere in the plan into any value of its type."""
    plan: Any = _redrawn(GOOD, Plan, data)
    if plan != GOOD:
        check(plan)


def _redrawn(item: Any, hint: Any, data: st.DataObject) -> Any:
    """Return the item with one field, at a random depth, drawn anew."""
    if (
        is_dataclass(item)
        and not isinstance(item, Mesh | TensorSpec)
        and data.draw(st.integers(0, 9))
    ):
        field = data.draw(
            st.sampled_from([f for f in fields(item) if f.init and f.name != "version"])
        )
        kind = get_type_hints(type(item))[field.name]
        return replace(item, **{field.name: _redrawn(getattr(item, field.name), kind, data)})
    if isinstance(item, tuple) and item and is_dataclass(item[0]) and data.draw(st.integers(0, 9)):
        k = data.draw(st.integers(0, len(item) - 1))
        return (*item[:k], _redrawn(item[k], None, data), *item[k + 1 :])
    if hint is None:
        return item
    return data.draw(documents(hint))


def _without_one_wait(plan: Plan) -> Iterator[tuple[Plan, str, int, int]]:
    for role, index, instr in plan.instructions():
        for k, (stream, count) in enumerate(instr.waits):
            waits = instr.waits[:k] + instr.waits[k + 1 :]
            on_stream = [i for i, other in enumerate(role.program) if other.stream == stream]
            changed = change_program(
                plan,
                role.role,
                lambda p, i=index, w=waits: p.__setitem__(i, replace(p[i], waits=w)),
            )
            yield changed, role.role, on_stream[count - 1], index


def test_any_wait_that_is_dropped_is_noticed_unless_others_imply_it() -> None:
    needed = implied = 0
    for plan, role, awaited, index in _without_one_wait(GOOD):
        redundant = HappensBefore(plan.role(role)).precedes(awaited, index)
        assert (check(with_peaks(plan)) == []) == redundant, (role, index)
        needed, implied = needed + (not redundant), implied + redundant
    assert needed >= 15 and implied >= 5


def test_any_instruction_free_or_allocation_that_is_dropped_is_noticed() -> None:
    tried = 0
    for role, index, instr in GOOD.instructions():
        thinner = [()]  # without the instruction itself
        for name in ("frees_before", "allocs_after"):
            values = getattr(instr, name)
            thinner += [
                (replace(instr, **{name: values[:k] + values[k + 1 :]}),)
                for k in range(len(values))
            ]
        for p, part in enumerate(instr.parts):
            for k in range(len(part.frees)):
                less = replace(part, frees=part.frees[:k] + part.frees[k + 1 :])
                thinner.append(
                    (replace(instr, parts=(*instr.parts[:p], less, *instr.parts[p + 1 :])),)
                )
        for kept in thinner:
            program = (*role.program[:index], *kept, *role.program[index + 1 :])
            assert check(change_role(GOOD, role.role, program=program)), (role.role, index, kept)
            tried += 1
    assert tried > 60
