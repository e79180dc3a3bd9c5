"""Collectives do what their laws say, and rules of `verify` find the one thing that is wrong in a plan of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from packages.ir.tests.breaks import Breaks
from packages.ir.tests.plans_for_tests import (
    change_instr,
    change_part,
    change_program,
    change_role,
    find,
)
from piper_ir.fold.timing import prepare
from piper_ir.ground.codec import dumps, loads
from piper_ir.ground.errors import PlanError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.plan import Channel, Instr, Part, Plan, Value
from piper_ir.plan.plan_bytes import PlanBytes
from piper_ir.program.collectives import COLLECTIVES, Law, law_of
from piper_ir.program.ops import Collective, Recv, Send, message_op
from piper_ir.verify import check
from piper_ir.verify.dataflow import _Dataflow
from piper_ir.verify.rules import Findings
from tests.helpers.cases import each_case
from tests.helpers.collective_plans import plan

PLANS = {n: plan(n) for n in (2, 4)}
GOOD = PLANS[2]


def spec(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "float32")


def test_what_is_written_follows_from_what_is_read() -> None:
    shapes = {kind: law.written(spec(8, 3), 4).shape for kind, law in COLLECTIVES.items()}
    assert shapes == {
        "all_reduce": (8, 3),
        "all_gather": (32, 3),
        "reduce_scatter": (2, 3),
        "all_to_all": (8, 3),
        "shift": (8, 3),
    }
    assert COLLECTIVES["all_reduce"].written(spec(), 4) == spec(), "a scalar is whole"


@each_case("kind", ["all_gather", "reduce_scatter", "all_to_all"])
def test_what_cannot_be_taken_apart_is_refused(kind: str) -> None:
    with pytest.raises(
        PlanError, match=f"{COLLECTIVES[kind].name} takes a tensor apart along its first dimension"
    ):
        law_of(kind).written(spec(), 2)
    if COLLECTIVES[kind].reads == "whole":
        with pytest.raises(
            PlanError, match=r"of 4 members needs a first dimension that divides by 4, found 6"
        ):
            law_of(kind).written(spec(6), 4)


def test_bytes_on_the_wire() -> None:
    """The factors are those by which NCCL's tests turn algorithm bandwidth into bus bandwidth."""
    factors = {kind: [law.wire(n) for n in (1, 2, 4)] for kind, law in COLLECTIVES.items()}
    half = [0.0, 0.5, 0.75]
    blocks = {"all_gather": half, "reduce_scatter": half, "all_to_all": half}
    assert factors == {"all_reduce": [0.0, 1.0, 1.5], **blocks, "shift": [0.0, 1.0, 1.0]}


def test_unknown_kinds_are_named() -> None:
    with pytest.raises(
        PlanError, match="there is no collective 'gossip'; known are all_reduce, all_gather"
    ):
        law_of("gossip")


@each_case("n", PLANS)
def test_a_plan_with_every_collective_is_good(n: int) -> None:
    made = PLANS[n]
    assert check(made) == []
    assert loads(Plan, dumps(made)) == made
    used = {
        i.parts[0].op.kind
        for _, _, i in made.instructions()
        if isinstance(i.parts[0].op, Collective)
    }
    assert used == {"all_gather", "reduce_scatter", "all_to_all"}
    groups = [g for g, p2p in zip(prepare(made).groups, prepare(made).p2p, strict=True) if not p2p]
    assert len(groups) == 2 * 4 and all(len(g) == n for g in groups), "all members start together"


def test_the_bytes_of_a_message_are_those_of_the_whole_tensor() -> None:
    traffic = PlanBytes(PLANS[4])
    parts = [i.parts[0] for i in PLANS[4].roles[0].program if isinstance(i.parts[0].op, Collective)]
    sizes = {message_op(p.op): traffic.message_bytes(p.op, p) for p in parts}  # type: ignore[arg-type]  # collectives
    assert sizes == dict.fromkeys(("all_to_all", "reduce_scatter", "all_gather"), 4 * 4 * 8)


breaks = Breaks(GOOD)


def everywhere(made: Plan, node: str, op: Collective) -> Plan:
    """Put an op in place of that of a node on every role; "{}" in the node stands for the role."""
    for role in made.roles:
        made = change_part(made, role.role, node.format(role.role), op=op)
    return made


breaks(
    "R06-names",
    "there is no collective gossip (known are all_reduce, all_gather, reduce_scatter, all_to_all, shift, to_host, from_host)",
)(lambda made: everywhere(made, "all_to_all.held@0#{}", Collective("gossip", "swap")))
breaks("R07-signature", "AllToAll works on values, and it names the bucket b0")(
    lambda made: change_part(
        made,
        "r0",
        "all_gather.whole@0#r0",
        op=Collective("all_to_all", "sum", "b0"),
        reads=(),
        writes=(),
    )
)
breaks("R07-signature", "AllToAll of 2 members needs a first dimension that divides by 2, found 3")(
    lambda made: replace(
        made,
        values={**made.values, "h@0": Value("h@0", TensorSpec((3, 4), "float64"), "activation")},
    )
)
breaks("R07-signature", "it writes part@0#r0, a float64[4,4]; float64[2,4] is expected")(
    lambda made: replace(
        made,
        values={**made.values, "part@0#r0": replace(made.values["whole@0#r0"], id="part@0#r0")},
    )
)
breaks("R10-channel-use", "channel h.1 is p2p; AllToAll needs group")(
    lambda made: everywhere(made, "all_to_all.held@0#{}", Collective("all_to_all", "h.1"))
)


@breaks("R12-allocated", "the buffer of held@1#r1 is allocated 0 times; once is expected")
def _not_allocated(made: Plan) -> Plan:
    role = made.role("r1")
    first = tuple(v for v in role.allocs_first if v != "held@1#r1")
    return replace(made, roles=(made.roles[0], replace(role, allocs_first=first)))


breaks("R13-read-after-write", "no wait makes this instruction come after it")(
    lambda made: change_instr(made, "r1", "branch1.F@0", waits=(("recv", 1),))
)


@breaks("R16-free-covered", "without having waited for instruction")
def _freed_early(made: Plan) -> Plan:
    update = made.role("r1").program[find(made, "r1", "update#1")]
    waits = tuple((s, n - (s == "group")) for s, n in update.waits)
    return change_instr(made, "r1", "update#1", waits=waits)


@breaks(
    "R18-group-match", "AllGather of float64[2,4] on role r0, AllReduce of float64[2,4] on role r1"
)
def _other_kind(made: Plan) -> Plan:
    values = {**made.values, "whole@0#r1": replace(made.values["part@0#r1"], id="whole@0#r1")}
    op = Collective("all_reduce", "sum")
    return change_part(replace(made, values=values), "r1", "all_gather.whole@0#r1", op=op)


@breaks("R18-group-match", "channel sum: role r0 meets 3 times, role r1 meets 4 times")
def _missing(made: Plan) -> Plan:
    """Drop the last gather of r0 and its update's wait for it; what it would have written goes unwritten on r0."""

    def edit(program: list[Instr]) -> None:
        del program[find(made, "r0", "all_gather.whole@1#r0")]
        k = next(k for k, i in enumerate(program) if i.name.startswith("stem.W@1"))
        last = program[k].parts[0]
        program[k] = replace(
            program[k],
            parts=(replace(last, reads=(*last.reads[:2], "whole@0#r0")),),
            waits=(("group", 7),),
        )
        frees = tuple(v for v in program[-1].frees_before if v != "whole@1#r0")
        waits = tuple((s, 7 if s == "group" else n) for s, n in program[-1].waits)
        program[-1] = replace(program[-1], waits=waits, frees_before=frees)

    made = change_program(made, "r0", edit)
    role = made.role("r0")
    first = tuple(v for v in role.allocs_first if v != "whole@1#r0")
    values = {k: v for k, v in made.values.items() if k != "whole@1#r0"}
    return replace(made, roles=(replace(role, allocs_first=first), made.roles[1]), values=values)


@breaks("R19-deadlock", "meets r1[")
def _crossed(made: Plan) -> Plan:
    """Let r0 exchange before it sends what r1 must have to exchange."""

    def edit(program: list[Instr]) -> None:
        send = find(made, "r0", "send.h@0#r1")
        swap = find(made, "r0", "all_to_all.swapped@0#r0")
        program[send] = replace(program[send], waits=(("compute", 1), ("group", 1)))
        program.insert(send, program.pop(swap))

    return change_program(made, "r0", edit)


breaks(
    "R27-dataflow",
    "branch0.F@0 reads swapped@0#r0 as in0: missing stem:out0@0; not asked for blocks of AllToAll of stem:out0@0",
)(lambda made: change_part(made, "r0", "branch0.F@0", reads=("swapped@0#r0",)))


@breaks("R27-dataflow", "not asked for blocks of AllToAll of blocks of AllToAll of")
def _other_members(made: Plan) -> Plan:
    """Let the second exchange go over replicas too, whose members are not those that took the tensor apart."""
    wide = replace(made.channel("swap"), id="wide", over=("dp",))
    return everywhere(
        replace(made, channels=(*made.channels, wide)),
        "all_to_all.held@0#{}",
        Collective("all_to_all", "wide"),
    )


breaks_of_first_part = Breaks(GOOD)


@breaks_of_first_part(
    "R27-dataflow", "stem.W@0 reads whole@0#r0 as tan0: missing branch0:gin0@0, branch1:gin0@0"
)
def _gathered_only(made: Plan) -> Plan:
    """Gather what one member gives, where a sum is asked for."""
    small = {
        id: replace(v, spec=TensorSpec((2, 4), "float64"))
        for id, v in made.values.items()
        if id.startswith("part@0")
    }
    return everywhere(
        replace(made, values={**made.values, **small}),
        "reduce_scatter.part@0#{}",
        Collective("first_part", "sum"),
    )


@breaks("R29-spoiled", "gh0@0 is undefined after ReduceScatter, and instruction")
def _read_again(made: Plan) -> Plan:
    """Let r0's weight gradient read what the reduction may use as room to work in."""
    return change_part(made, "r0", "branch0.W@0", reads=("held@0#r0", "gh0@0"))


FIRST_PART = Law("FirstPart", "whole", "part", "first")


def test_one_fault_breaks_one_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    breaks.check()
    monkeypatch.setitem(COLLECTIVES, "first_part", FIRST_PART)
    breaks_of_first_part.check()


def test_a_reduction_of_a_bucket_is_an_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket needs an all-reduce also where another collective works on buckets."""
    from packages.ir.tests.plans_for_tests import good_plan

    monkeypatch.setitem(COLLECTIVES, "average", replace(COLLECTIVES["all_reduce"], name="Average"))
    made = good_plan()
    for role in ("pp0", "pp1"):
        made = change_part(made, role, "reduce.tied", op=Collective("average", "tied", "tied"))
    assert {v.rule for v in check(made)} == {"R24-reduction"}
    assert "is given to Average; AllReduce is expected" in str(check(made)[0])


def test_what_reads_before_a_spoiling_collective_is_fine() -> None:
    """The plan is right where branch 0's weight gradient reads the tensor first, and the reduction waits for that."""
    role = GOOD.role("r0")
    at, reduce = find(GOOD, "r0", "branch0.W@0"), find(GOOD, "r0", "reduce_scatter.part@0#r0")
    count = sum(i.stream == "compute" for i in role.program[: at + 1])

    def edit(program: list[Instr]) -> None:
        program.insert(reduce, program.pop(at))
        program[reduce + 1] = replace(program[reduce + 1], waits=(("compute", count),))

    moved = change_part(
        change_program(GOOD, "r0", edit), "r0", "branch0.W@0", reads=("held@0#r0", "gh0@0")
    )
    assert {v.rule for v in check(moved)} == {"R27-dataflow"}, (
        "it is not what the branch asks for, but it is there"
    )


def test_a_channel_may_carry_collectives_of_several_kinds() -> None:
    ops = [i.parts[0].op for i in GOOD.roles[0].program]
    assert {op.kind for op in ops if isinstance(op, Collective) and op.channel == "sum"} == {
        "reduce_scatter",
        "all_gather",
    }


def shifted(made: Plan) -> Plan:
    """Each rank gathers the part of the rank before it: r0 and r1 send each other what the reduction gave them."""
    for mb in range(2):
        for role in ("r0", "r1"):
            other = "r1" if role == "r0" else "r0"
            part, copy = f"part@{mb}#{role}", f"part@{mb}#{role}#{other}"
            name = f"p.{role}"
            channel = Channel(name, "p2p", (role, other), ("send", "recv"))
            channels = (
                made.channels
                if any(c.id == name for c in made.channels)
                else (*made.channels, channel)
            )
            values = {**made.values, copy: replace(made.values[part], id=copy)}
            made = replace(made, channels=channels, values=values)
    for role in ("r0", "r1"):
        made = change_program(made, role, lambda program, role=role: _send_parts(program, role))
        other = "r1" if role == "r0" else "r0"
        first = (*made.role(role).allocs_first, *(f"part@{mb}#{other}#{role}" for mb in range(2)))
        made = change_role(made, role, allocs_first=first)
    return made


def _send_parts(program: list[Instr], role: str) -> None:
    other = "r1" if role == "r0" else "r0"
    for mb in range(2):
        at = next(
            k for k, i in enumerate(program) if i.parts[0].node == f"all_gather.whole@{mb}#{role}"
        )
        mine, theirs = f"part@{mb}#{role}", f"part@{mb}#{other}#{role}"
        before = {s: sum(i.stream == s for i in program[:at]) for s in ("send", "recv", "group")}
        gather = program[at]
        waits = (("recv", before["recv"] + 1), *gather.waits)
        send = Instr(
            "send",
            (Part(f"send.{mine}", Send(f"p.{role}"), mb, (mine,)),),
            (("group", before["group"]),),
        )
        receive = Instr("recv", (Part(f"recv.{theirs}", Recv(f"p.{other}"), mb, (), (theirs,)),))
        gather = replace(gather, parts=(replace(gather.parts[0], reads=(theirs,)),), waits=waits)
        program[at : at + 1] = [send, receive, gather] if role == "r0" else [receive, send, gather]
        for k in range(at + 3, len(program)):
            more = {"send": 1, "recv": 1}
            program[k] = replace(
                program[k],
                waits=tuple(
                    (s, n + more.get(s, 0) * (n > before.get(s, 0))) for s, n in program[k].waits
                ),
            )
    last = program[-1]
    full = {s: sum(i.stream == s for i in program) for s in ("send", "recv", "group")}
    frees = (*last.frees_before, *(f"part@{mb}#{other}#{role}" for mb in range(2)))
    program[-1] = replace(last, waits=tuple(full.items()), frees_before=frees)


def test_parts_that_change_their_rank_are_not_the_whole_again() -> None:
    """A gather of parts that were sent around puts the blocks in another order."""
    found = check(shifted(GOOD))
    assert {v.rule for v in found} == {"R27-dataflow"}, [str(v) for v in found]
    assert "not asked for blocks of AllGather of blocks of ReduceScatter" in str(found[0])


def test_what_the_first_member_has_is_not_what_each_replica_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(COLLECTIVES, "broadcast", Law("Broadcast", "whole", "whole", "first"))
    wide = replace(
        everywhere(GOOD, "all_to_all.swapped@0#{}", Collective("broadcast", "swap")), mesh=GOOD.mesh
    )
    assert {
        v.rule
        for v in check(everywhere(wide, "all_to_all.held@0#{}", Collective("broadcast", "swap")))
    } == set()
    flow = _Dataflow(
        Findings(
            replace(
                GOOD, mesh=Mesh(pp=2, dp=2), channels=(replace(GOOD.channel("swap"), over=("dp",)),)
            )
        )
    )
    made = flow._collected(
        Collective("broadcast", "swap"), {"r0": (("stem", "out0"), 0), "r1": (("stem", "out0"), 0)}
    )
    assert all(not isinstance(origin, tuple) for origin in made.values())


def test_a_group_of_roles_that_place_different_axes_is_refused() -> None:
    roles = (
        replace(GOOD.roles[0], placed={"pp": 0}),
        replace(GOOD.roles[1], placed={"pp": 1, "cp": 0}, ranks=(1,)),
    )
    found = check(replace(GOOD, mesh=Mesh(pp=2, cp=2), roles=roles))
    assert any(v.rule == "R09-channels" and "place different axes" in str(v) for v in found)


def test_numbers_that_a_transport_cannot_add_are_refused() -> None:
    with pytest.raises(PlanError, match=r"AllReduce adds float64, .*; bool is none of them"):
        law_of("all_reduce").written(TensorSpec((4,), "bool"), 2)
    assert law_of("all_gather").written(TensorSpec((4,), "bool"), 2).shape == (8,)
