"""Collectives on every executor: the numbers of a plain computation, the bytes of the plan, and one that this file
adds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist

from packages.runtime.tests.chains import TOLERANCE, distance
from packages.runtime.tests.test_runtime_memory import planned_after
from piper_ir.fold.timing import prepare
from piper_ir.ground.errors import ExecutionError
from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.plan import Plan
from piper_ir.program.collectives import COLLECTIVES, Law
from piper_ir.program.ops import Collective, message_op
from piper_ir.verify import check
from piper_runtime import execute
from piper_runtime.engine.inline import collected
from piper_runtime.launch.processes.processes import Pool
from piper_runtime.profile.measured_plans import channels_plan, group_channel
from piper_runtime.rank.binding.rank import BoundComm
from piper_runtime.transport import gloo, nccl
from piper_runtime.transport.gloo import GlooCommunicators, Members
from piper_runtime.transport.nccl import NcclCommunicators
from piper_runtime.transport.staging import StagedCommunicators
from piper_simulator import (
    DeviceModel,
    by_formula,
    load_cluster,
    message_flows,
    rank_group,
    route,
    wiring,
)
from tests.helpers.cases import each_case
from tests.helpers.collective_model import code, job
from tests.helpers.collective_plans import plan

SIZES = (2, 4)
PLANS = {n: plan(n) for n in SIZES}

PLAIN: dict[str, Callable[[list[torch.Tensor], int], torch.Tensor]] = {
    "all_reduce": lambda given, k: torch.stack(given).sum(0),
    "all_gather": lambda given, k: torch.cat(given),
    "reduce_scatter": lambda given, k: torch.stack(given).sum(0).tensor_split(len(given))[k],
    "all_to_all": lambda given, k: torch.cat([t.tensor_split(len(given))[k] for t in given]),
    "shift": lambda given, k: given[(k - 1) % len(given)],
    "broadcast": lambda given, k: given[0],
}
"""What member k gets when the members give these tensors, in plain PyTorch."""


def given(
    n: int, dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (8, 3)
) -> list[torch.Tensor]:
    """A tensor for each member; sums of whole numbers are exact in every order."""
    generator = torch.Generator().manual_seed(n)
    return [torch.randint(-50, 50, shape, generator=generator).to(dtype) for _ in range(n)]


def comm_of(
    kind: str, tensors: Sequence[torch.Tensor], rank: int
) -> tuple[BoundComm, torch.Tensor]:
    """A communication of these tensors on the channel of all ranks, and the tensor that has its result."""
    law, n = COLLECTIVES[kind], len(tensors)
    members = tuple(range(n))
    operand = tensors[rank].clone()
    if law.in_place:
        return BoundComm(kind, group_channel(members), members, lambda: operand), operand
    shape = law.written(TensorSpec(tuple(operand.shape), "float32"), n).shape
    result = torch.empty(shape, dtype=operand.dtype)  # type: ignore[arg-type]  # sizes of a plan are ints
    return BoundComm(kind, group_channel(members), members, lambda: operand, lambda: result), result


Bind = Callable[[GlooCommunicators], Any]


def over_gloo(kind: str, tensors: Sequence[torch.Tensor], bind: Bind) -> list[torch.Tensor]:
    """What each rank gets, every rank on a thread of its own; twice, for a binding may be run again."""
    n, store = len(tensors), dist.HashStore()
    channels = channels_plan(n, (tuple(range(n)),))
    results: list[torch.Tensor] = [torch.empty(0)] * n
    errors: list[BaseException] = []

    def rank(k: int) -> None:
        try:
            communicators = GlooCommunicators(store, k)
            communicators.connect(channels)
            for _ in range(2):
                comm, results[k] = comm_of(kind, tensors, k)
                bind(communicators).bind(comm)()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=rank, args=(k,)) for k in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return results


TRANSPORTS: dict[str, Callable[[str, Sequence[torch.Tensor]], list[torch.Tensor]]] = {
    "inline": lambda kind, tensors: collected(COLLECTIVES[kind], list(tensors)),
    "gloo": lambda kind, tensors: over_gloo(kind, tensors, lambda c: c),
    "staged": lambda kind, tensors: over_gloo(kind, tensors, StagedCommunicators),
}


@each_case("n", SIZES)
@each_case("kind", COLLECTIVES)
@each_case("transport", TRANSPORTS)
def test_the_numbers_are_those_of_a_plain_computation(transport: str, kind: str, n: int) -> None:
    tensors = given(n)
    found = TRANSPORTS[transport](kind, tensors)
    for k in range(n):
        assert torch.equal(found[k], PLAIN[kind](tensors, k)), f"rank {k}"


@each_case("dtype", [torch.float32, torch.bfloat16, torch.int64])
@each_case("kind", ["all_gather", "reduce_scatter"])
def test_over_gloo_in_other_dtypes_and_shapes(kind: str, dtype: torch.dtype) -> None:
    tensors = given(2, dtype, (4,))
    for k, found in enumerate(TRANSPORTS["gloo"](kind, tensors)):
        assert torch.equal(found, PLAIN[kind](tensors, k))


class AskedGroup:
    """In place of NCCL's process group: does at once what it is asked for, as the only member, and notes it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            self.asked.append((name, args[-1].asyncOp))

        return call


def test_nccl_is_asked_for_each_on_the_stream_that_is_current() -> None:
    found = {}
    for kind, bind in nccl.BINDINGS.items():
        group, (comm, _) = AskedGroup(), comm_of(kind, given(2), 0)
        bind(group, comm)()
        (found[kind],) = group.asked
    assert found == {
        "all_reduce": ("allreduce", False),
        "all_gather": ("_allgather_base", False),
        "reduce_scatter": ("_reduce_scatter_base", False),
        "all_to_all": ("alltoall_base", False),
        "shift": ("alltoall_base", False),
    }
    assert all(hasattr(dist.ProcessGroup, name) for name, _ in found.values())


def test_every_transport_carries_every_collective() -> None:
    assert gloo.BINDINGS.keys() == nccl.BINDINGS.keys() == COLLECTIVES.keys()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("launcher", ["inline", "processes"])
def test_plans_of_collectives_train_what_one_device_trains(
    launcher: str, n: int, pool: Pool
) -> None:
    """Also the bytes after every instruction are those of the plan: no transport keeps a copy."""
    made, task = PLANS[n], job(n)
    more = {"pool": pool} if launcher == "processes" else {}
    run = execute(
        made, code(n), task, steps=3, launcher=launcher, gradients=True, memory=True, **more
    )  # type: ignore[arg-type]  # the launcher is one of them
    assert distance(run, made, task) < TOLERANCE
    for role in made.roles:
        record = run.memory[role.ranks[0]]
        assert record.peak == role.peak_bytes
        assert [(p.instr, p.after) for p in record.points if p.instr >= 0] == list(
            planned_after(made, role)
        )


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all"])
def test_negative_control_a_wrong_order_of_ranks_is_noticed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two meetings gives each rank what is another one's."""
    calls = count()

    def wrong(law: Law, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if law != COLLECTIVES[kind] or next(calls) % 2:
            return collected(law, tensors)
        return (
            collected(law, tensors[::-1]) if law.reads == "part" else collected(law, tensors)[::-1]
        )

    monkeypatch.setattr("piper_runtime.engine.inline.collected", wrong)
    made, task = PLANS[2], job(2)
    assert (
        distance(
            execute(made, code(2), task, steps=2, launcher="inline", gradients=True), made, task
        )
        > 1e-6
    )


def test_simulated_messages_take_what_the_formulas_say() -> None:
    """Each by its own op, also where a channel carries several; wire bytes by the law."""
    made, cluster = PLANS[4], load_cluster("h100x8")
    model, where = DeviceModel(made, cluster, None), rank_group(cluster, range(4))
    role, seen = made.roles[0], set[str]()
    for instr in role.program:
        op = instr.parts[0].op
        if isinstance(op, Collective):
            work = model.work(role, instr)
            assert work.bytes == 4 * 4 * 8
            assert work.seconds == by_formula(cluster, op.kind, work.bytes, where) > 0
            seen.add(op.kind)
    assert seen == {"all_gather", "reduce_scatter", "all_to_all"}
    prepared = prepare(made)
    work = [model.work(role, instr) for role, _, instr in made.instructions()]
    ops = [instr.parts[0].op for _, _, instr in made.instructions()]
    wires = wiring(cluster)
    for members, flow in zip(
        prepared.groups, message_flows(made, prepared, work, wires), strict=True
    ):
        op = ops[members[0]]
        if isinstance(op, Collective):
            assert (
                route(message_op(op), [tuple(range(4))], wires).wire
                == COLLECTIVES[op.kind].wire(4)
                == 0.75
            )
            assert flow.seconds > 0


BROADCAST = Law("Broadcast", "whole", "whole", "first")


def _broadcast(members: Members, comm: BoundComm) -> Callable[[], Callable[[], None]]:
    options = torch._C._distributed_c10d.BroadcastOptions()
    options.rootRank = 0
    return lambda: members.group.broadcast([comm.operand()], options).wait


@pytest.fixture
def broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more collective: a row of the table and a binding. CONTRIBUTING.md shows these lines."""
    monkeypatch.setitem(COLLECTIVES, "broadcast", BROADCAST)
    monkeypatch.setitem(gloo.BINDINGS, "broadcast", _broadcast)


def swapped_for_broadcast(made: Plan) -> Plan:
    """The plan, with a broadcast in place of each first exchange of blocks."""

    def changed(instr: Any) -> Any:
        part = instr.parts[0]
        if not part.node.startswith("all_to_all."):
            return instr
        return replace(instr, parts=(replace(part, op=Collective("broadcast", part.op.channel)),))

    return replace(
        made, roles=tuple(replace(r, program=tuple(map(changed, r.program))) for r in made.roles)
    )


@pytest.mark.usefixtures("broadcast")
@each_case("transport", TRANSPORTS)
def test_one_more_collective_is_a_row_and_a_binding(transport: str) -> None:
    tensors = given(4)
    assert all(
        torch.equal(found, tensors[0]) for found in TRANSPORTS[transport]("broadcast", tensors)
    )


@pytest.mark.usefixtures("broadcast")
def test_one_more_collective_is_verified_simulated_and_executed() -> None:
    made, task = swapped_for_broadcast(PLANS[4]), job(4)
    assert check(made) == [], "rank 0 has what all have, so the values are the same"
    assert (
        distance(
            execute(made, code(4), task, steps=2, launcher="inline", gradients=True), made, task
        )
        < TOLERANCE
    )
    cluster = load_cluster("h100x8")
    instr = next(
        i for i in made.roles[0].program if i.parts[0].op == Collective("broadcast", "swap")
    )
    assert DeviceModel(made, cluster, None).work(made.roles[0], instr).seconds > 0


def test_a_collective_without_a_binding_is_named() -> None:
    with pytest.raises(
        ExecutionError,
        match="gloo has no binding for the collective 'gossip'; it has all_reduce, all_gather",
    ):
        raise gloo.no_binding("gloo", "gossip", gloo.BINDINGS)
    communicators = NcclCommunicators(
        GlooCommunicators(dist.HashStore(), 0), torch.device("cuda", 0)
    )
    communicators._groups["x"], communicators._keys["c"] = object(), "x"
    with pytest.raises(ExecutionError, match="NCCL has no binding for the collective 'gossip'"):
        communicators.bind(BoundComm("gossip", "c", (0, 1), lambda: torch.zeros(1)))
