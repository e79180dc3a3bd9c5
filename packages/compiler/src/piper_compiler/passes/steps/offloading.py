"""Add the copies of offloaded tensors once the compute of every role is in order: to the host, and back.

Nodes are added behind scheduling, as `residency` does, since all of them are local to a role:

    to_host     a tensor's copy, right after the last forward that uses it; the tensor is freed when it has ended
    from_host   the tensor again, `prefetch` backwards of offloaded chunks ahead of its first reader; these read it

A tensor stays if no compute would run between its last use in forward and the moment when it would be brought back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from piper_compiler.durations import BoundChunks
from piper_compiler.passes.steps.adder import Adder, HeldValues, Scheduled
from piper_compiler.passes.steps.dependencies import Dependencies
from piper_compiler.ports import kept_inside, signatures, value_reads
from piper_ir.graph.graph import Graph, GraphValue, Node, Offloading
from piper_ir.ground.sizes import TensorSpec, bind
from piper_ir.plan.plan import HOST, Category
from piper_ir.program.collectives import FROM_HOST, TO_HOST
from piper_ir.program.ops import COMM, Collective, Compute


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Describe a tensor that may wait on the host.

    Attributes:
        value: its id.
        tail: the end of its name after the microbatch.
        saved: whether a forward saves it for the backward of its chunk, so that no other chunk uses it.
        users: the nodes that write or read it in forward.
        readers: the nodes that read it in backward.
        policy: the policy of the chunk of the first reader.
    """

    value: str
    spec: TensorSpec
    tail: str
    saved: bool
    users: tuple[int, ...]
    readers: tuple[int, ...]
    policy: Offloading


@dataclass(frozen=True, slots=True)
class _Move:
    """Describe a tensor's way to the host and back in one microbatch, by places in the order of a role's compute.

    Attributes:
        last: the last compute in forward that uses it.
        ahead: the compute before which it is brought back.
        first: the first compute in backward that reads it.
        readers: the numbers of all of these.
    """

    tensor: _Tensor
    mb: int
    last: int
    ahead: int
    first: int
    readers: tuple[int, ...]


def offloading(placed: Scheduled, bound: BoundChunks) -> Scheduled:
    """Return the scheduled graph with the copies of offloaded tensors."""
    graph, deps = placed.graph, placed.deps
    if not graph.offloading:
        return placed
    adder = Adder(graph, deps)
    tensors = _Tensors(graph, deps, bound)
    orders: dict[str, list[int]] = {role: [] for role in graph.roles}
    for i in placed.sequence:
        if not deps.comm[i]:
            orders[deps.node(i).role].append(i)
    for role, order in orders.items():
        _Role(adder, role, order).add(tensors.on(role))
    made = adder.done(placed.sequence)
    held = dict(placed.held)
    for i, values in made.held.items():
        held[i] = (*held.get(i, ()), *values)
    return replace(made, held=held)


class _Tensors:
    """Find the tensors of offloaded chunks that wait for a backward."""

    def __init__(self, graph: Graph, deps: Dependencies, bound: BoundChunks) -> None:
        self._graph, self._nodes, self._bound = graph, deps.nodes, bound
        self._at: dict[str, list[int]] = {}
        for k, node in enumerate(deps.nodes):
            self._at.setdefault(node.id, []).append(k)

    def on(self, role: str) -> Iterator[_Tensor]:
        """Yield the tensors that a role may move, which are large enough."""
        handed_on: dict[str, None] = {}
        for k, node in enumerate(self._nodes):
            op = node.op
            if not isinstance(op, Compute) or node.role != role:
                continue
            policy = self._graph.offloading.get(op.chunk)
            if policy is None:
                continue
            if op.step == "F" and policy.tensors != "inputs":
                yield from self._saved(k, op, policy)
            if op.step != "F" and policy.tensors != "saved":
                handed_on.update(dict.fromkeys(self._read(node, op)))
        for value in handed_on:
            if (tensor := self._handed_on(value, role)) is not None:
                yield tensor

    def _saved(self, k: int, op: Compute, policy: Offloading) -> Iterator[_Tensor]:
        chunk = self._graph.program.chunk(op.variant)
        for port in kept_inside(self._graph.program, chunk, policy.told_by):
            if not self._fits(chunk.ports[port], policy):
                continue
            readers = tuple([j for j in self._backwards(k, op) if port in self._ports(j)])
            yield _Tensor(f"{chunk.id}:{port}", chunk.ports[port], "", True, (k,), readers, policy)

    def _backwards(self, k: int, op: Compute) -> Iterator[int]:
        """Yield the nodes of the backward of a forward, on its role."""
        for step in ("R", "B", "I", "W"):
            for j in self._at.get(f"{op.chunk}.{step}", ()):
                if self._nodes[j].role == self._nodes[k].role:
                    yield j

    def _ports(self, j: int) -> set[str]:
        op = self._nodes[j].op
        assert isinstance(op, Compute)
        chunk = self._graph.program.chunk(op.variant)
        return {p for sig in signatures(chunk, op.step, op.apart) for p in sig.reads}

    def _read(self, node: Node, op: Compute) -> Iterator[str]:
        """Yield the activations of chunks that a backward reads."""
        ports = value_reads(self._graph.program.chunk(op.variant), op.step, op.apart)
        for port, value in zip(ports, node.reads, strict=True):
            known = self._graph.values[value]
            if port.startswith(("in", "out")) and known.category == "activation":
                yield value

    def _handed_on(self, value: str, role: str) -> _Tensor | None:
        """Return a tensor that chunks hand on; None if it is small, or a backward reads it that wants it to stay."""
        graph = self._graph
        ids = dict.fromkeys([*graph.writers.get(value, ()), *graph.users.get(value, ())])
        at = [k for id in ids for k in self._at.get(id, ()) if self._touches(k, value, role)]
        users = [k for k in at if self._nodes[k].coords.get("phase") == "F"]
        readers = [k for k in at if self._nodes[k].coords.get("phase") != "F"]
        policies = []
        for k in readers:
            op = self._nodes[k].op
            policy = graph.offloading.get(op.chunk) if isinstance(op, Compute) else None
            if policy is None or policy.tensors == "saved":
                return None
            policies.append(policy)
        spec, tail = graph.values[value].spec, graph.values[value].tail
        computing = tuple([k for k in users if not isinstance(self._nodes[k].op, COMM)])
        if not computing or not policies or not self._fits(spec, policies[0]):
            return None
        return _Tensor(value, spec, tail, False, computing, tuple(readers), policies[0])

    def _touches(self, k: int, value: str, role: str) -> bool:
        """Return whether a node on a role reads or writes a value; in other microbatches its id may do otherwise."""
        node = self._nodes[k]
        return node.role == role and (value in node.reads or value in node.writes)

    def _fits(self, spec: TensorSpec, policy: Offloading) -> bool:
        return bind(spec.nbytes, self._bound.rows) >= max(1, policy.least_bytes)


class _Role:
    """Add the copies of one role, whose compute runs in this order."""

    def __init__(self, adder: Adder, role: str, order: Sequence[int]) -> None:
        self._adder, self._deps, self._role, self._order = adder, adder.deps, role, order
        self._place = {i: place for place, i in enumerate(order)}
        self._numbers: dict[int, Mapping[int, int]] = {}
        seen: set[tuple[str, int]] = set()
        self._turns: list[int] = []
        for place, i in enumerate(order):
            op, mb = self._deps.node(i).op, self._deps.mb[i]
            if isinstance(op, Compute) and op.step != "F" and op.chunk in adder.graph.offloading:
                if (op.chunk, mb) not in seen:
                    seen.add((op.chunk, mb))
                    self._turns.append(place)

    def add(self, tensors: Iterator[_Tensor]) -> None:
        """Add everything that the role moves; copies to the host in the order of last uses, others of first readers."""
        moves = [move for tensor in tensors for move in self._moves(tensor)]
        out: dict[tuple[str, int], int] = {}
        for move in sorted(moves, key=lambda m: m.last):
            out[move.tensor.value, move.mb] = self._to_host(move)
        for move in sorted(moves, key=lambda m: m.first):
            self._from_host(move, out[move.tensor.value, move.mb])

    def _moves(self, tensor: _Tensor) -> Iterator[_Move]:
        """Yield the microbatches in which compute runs between the last use and the return of a tensor."""
        nodes = self._deps.nodes
        for mb in dict.fromkeys([mb for k in tensor.users for mb in nodes[k].each]):
            used, read = (
                [i for k in ks if (i := self._number(k, mb)) is not None]
                for ks in (tensor.users, tensor.readers)
            )
            if not used or not read:
                continue
            last, first = (
                max(map(self._place.__getitem__, used)),
                min(map(self._place.__getitem__, read)),
            )
            turn = bisect_left(self._turns, first) - tensor.policy.prefetch
            ahead = first if not tensor.policy.prefetch else self._turns[turn] if turn >= 0 else 0
            if ahead - 1 > last:
                yield _Move(tensor, mb, last, ahead, first, tuple(read))

    def _number(self, k: int, mb: int) -> int | None:
        """Return the number of a node in a microbatch; None if it does not run there."""
        if k not in self._numbers:
            start = self._deps.starts[k]
            self._numbers[k] = {m: start + i for i, m in enumerate(self._deps.nodes[k].each)}
        return self._numbers[k].get(mb)

    def _to_host(self, move: _Move) -> int:
        tensor, last = move.tensor, self._order[move.last]
        if tensor.saved:
            self._adder.edit.value(tensor.value, tensor.spec, "activation")
            for k in tensor.users:
                if (i := self._number(k, move.mb)) is not None:
                    self._hold(i, tensor.value, tensor.value)
        copy = self._value(tensor, HOST)
        number = self._copy(TO_HOST, move, tensor.value, copy)
        self._adder.after.setdefault(last, []).append(number)
        self._adder.edges.append((last, number))
        return number

    def _from_host(self, move: _Move, out: int) -> None:
        tensor, before = move.tensor, self._order[move.ahead - 1]
        back = self._value(tensor, "back")
        number = self._copy(FROM_HOST, move, self._value(tensor, HOST), back)
        self._adder.after.setdefault(before, []).append(number)
        first = self._order[move.first]
        self._adder.edges += [(before, number), (out, number), (number, first)]
        for i in move.readers:
            self._hold(i, tensor.value, back)

    def _value(self, tensor: _Tensor, where: str) -> str:
        id, tail = f"{tensor.value}#{where}", f"{tensor.tail}#{where}"
        category: Category = HOST if where == HOST else "activation"
        self._adder.edit.values.setdefault(id, GraphValue(tensor.spec, category, tail))
        return id

    def _copy(self, kind: str, move: _Move, source: str, target: str) -> int:
        """Add a copy between the device and the host, and return its number."""
        tensor, channel = move.tensor, self._adder.host_channel(kind, self._role)
        at = self._deps.node(self._order[move.last if kind == TO_HOST else move.first])
        coords = {**at.coords, "op": kind}
        node = Node(
            f"{kind}.{tensor.value}#{self._role}",
            Collective(kind, channel),
            coords,
            (source,),
            (target,),
            self._role,
            kind,
            tail=f"{tensor.tail}#{self._role}",
        )
        return self._adder.add(node, move.mb)

    def _hold(self, number: int, value: str, copy: str) -> None:
        self._adder.held.setdefault(number, []).append((HOST, value, copy))


def moved(held: HeldValues) -> dict[str, str]:
    """Return the values that a node uses in place of others: a tensor that was brought back for the one that waited.

    A tensor that a forward saves, and that waits on the host, stands for itself.
    """
    return {value: copy for category, value, copy in held if category == HOST}
