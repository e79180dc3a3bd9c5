"""A plan knows its ranks, replicas, peers and sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from packages.ir.tests.plans_for_tests import good_plan
from piper_ir.fold.part_memory import value_ports
from piper_ir.ground.mesh import Mesh
from piper_ir.plan.plan import Channel, Instr, Part, Plan, RolePlan
from piper_ir.program.ops import Add, Send

GOOD = good_plan()


def _plan(mesh: Mesh, replicated: tuple[str, ...]) -> Plan:
    """Return a plan with one role per pipeline stage, without programs."""
    stages = range(mesh.size("pp"))
    roles = tuple(
        RolePlan(f"pp{s}", {"pp": s}, mesh.ranks({"pp": s}), (), ("compute",)) for s in stages
    )
    return replace(GOOD, mesh=mesh, replicated=replicated, roles=roles, rows=3, microbatches=5)


def test_every_rank_has_one_role() -> None:
    assert [GOOD.role_of(r).role for r in range(4)] == ["pp0", "pp0", "pp1", "pp1"]
    with pytest.raises(KeyError, match="rank 4 is in no role; the mesh has 4 ranks"):
        GOOD.role_of(4)


def test_replicas_share_the_global_batch_evenly() -> None:
    plan = _plan(Mesh(pp=2, dp=3, ep=2, tp=2), ("dp", "ep"))
    assert plan.replicas == 6 and plan.global_batch == 3 * 5 * 6
    for rank in range(plan.mesh.world):
        coords = plan.mesh.coords(rank)
        assert plan.replica_of(rank) == coords["ep"] + 2 * coords["dp"]
    by_replica: dict[int, int] = {}
    for rank in range(plan.mesh.world):
        by_replica[plan.replica_of(rank)] = by_replica.get(plan.replica_of(rank), 0) + 1
    assert by_replica == dict.fromkeys(range(6), 4)
    assert _plan(Mesh(pp=4), ()).replicas == 1


def test_peers_of_p2p_agree_on_what_is_not_placed() -> None:
    plan = _plan(Mesh(pp=3, dp=2), ("dp",))
    channel = Channel("c", "p2p", ("pp2", "pp0"), ("send", "recv"))
    assert plan.peers(channel, 1) == plan.peers(channel, 5) == (5, 1)
    assert plan.peers(channel, 0) == plan.peers(channel, 4) == (4, 0)


def test_peers_of_a_group_agree_on_what_is_neither_placed_nor_reduced_over() -> None:
    plan = _plan(Mesh(pp=2, dp=2, tp=2), ("dp",))
    both = Channel("c", "group", ("pp0", "pp1"), ("reduce", "reduce"), ("dp",))
    assert plan.peers(both, 0) == plan.peers(both, 6) == (0, 2, 4, 6)
    assert plan.peers(both, 7) == (1, 3, 5, 7)
    across = replace(both, over=())
    assert plan.peers(across, 0) == (0, 4) and plan.peers(across, 3) == (3, 7)
    one = Channel("c", "group", ("pp1",), ("reduce",), ("dp",))
    assert plan.peers(one, 4) == (4, 6)


def test_every_member_sees_the_same_group() -> None:
    for channel in GOOD.channels:
        groups = {
            plan_peers
            for r in range(4)
            if GOOD.role_of(r).role in channel.roles
            for plan_peers in [GOOD.peers(channel, r)]
        }
        members = [r for g in groups for r in g]
        assert sorted(members) == [
            r for role in GOOD.roles if role.role in channel.roles for r in role.ranks
        ]


def test_streams_names_and_communication() -> None:
    assert (
        GOOD.channel("act").stream_on("pp0") == "send"
        and GOOD.channel("act").stream_on("pp1") == "recv"
    )
    send = Instr("send", (Part("s", Send("act"), 0, ("v",)),))
    two = Instr("compute", (Part("layer3.I@2", Add(), 2), Part("layer3.W@2", Add(), 2)))
    assert send.comm and not two.comm
    assert (send.name, two.name) == ("s", "layer3.I@2+1")


def test_value_ports_skip_parameters_and_buffers() -> None:
    forward = next(p for _, _, i in GOOD.instructions() for p in i.parts if p.node == "head.F@1")
    assert value_ports(GOOD.chunk("head"), forward) == {
        0: "a@1#pp1",
        1: "b@1#pp1",
        2: "a@1#pp1",
        3: "t@1",
    }
    backward = next(p for _, _, i in GOOD.instructions() for p in i.parts if p.node == "head.I@1")
    assert value_ports(GOOD.chunk("head"), backward) == {0: "h@1", 1: "seed@1"}
