"""Define `recompute`: keep fewer tensors from forward to backward, and make the others again before the backward.

    before  layer1.F@0 (keeps all that I and W need) -> layer1.B@0: I, W
    after   layer1.F@0 (keeps what `keep` names) -> layer1.B@0: R, I, W     recompute(where(layer=1), keep="inputs")

With `apart` R is a node of its own, layer1.R@0, before layer1.B@0: `order` may name it by phase="R", so that it runs in
a bubble before the gradient arrives. An R that no order names waits for what its backward waits for.

Legality
 1. Forward and backward are selected alike: a policy holds for both.
 2. `keep` is "all", "products", "attention", "inputs", or names of ops that the selected chunks run.
 3. No selected node is under a policy already.
 4. The program is of a captured model: R is code that capture makes.
 5. R reads no buffer that the model changes while it runs, since by then it holds something else.
 6. There is something to make again, unless keep is "all".
 7. `group` is 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from piper_compiler.directives.base import Directive, call_site, compute_nodes, directive, fail, names, site_field
from piper_compiler.directives.decided import Decided
from piper_compiler.ports import port_value, steps_of, value_reads
from piper_ir.graph import Graph, Node
from piper_ir.graph_parts import common, compute_id, in_mbs
from piper_ir.ops import KEEP_ALL, Compute, variant_name
from piper_ir.program import Chunk, Program
from piper_ir.select import Where

POLICIES = (KEEP_ALL, "products", "attention", "inputs")
"""The policies that have a name; any other is names of ops, joined by "+"."""


@runtime_checkable
class Recomputing(Protocol):
    """Describe a directive that puts nodes under policies of recomputation.

    `policies` returns those for which the program needs variants, before anything is compiled.
    """

    def policies(self) -> tuple[str, ...]: ...


def policies_of(directives: Iterable[Directive]) -> tuple[str, ...]:
    """Return the policies of recomputation that directives ask for, other than to keep all."""
    found = {p for d in directives if isinstance(d, Recomputing) for p in d.policies()}
    return tuple(sorted(found - {KEEP_ALL}))


@directive
@dataclass(frozen=True, init=False)
class Recompute:
    """Put the selected chunks and microbatches under a policy of recomputation.

    Attributes:
        keep: the policy: what F keeps of the tensors that backward needs.
        group: layers that are made again together.
        apart: whether R is a node of its own.
        site: where the user wrote it.
    """

    selection: Where
    keep: str = "inputs"
    group: int = 1
    apart: bool = False
    site: str = site_field()

    def __init__(
        self,
        selection: Where,
        keep: str | tuple[str, ...] = "inputs",
        group: int = 1,
        apart: bool = False,
        site: str | None = None,
    ) -> None:
        object.__setattr__(self, "selection", selection)
        object.__setattr__(self, "keep", policy_name(keep))
        object.__setattr__(self, "group", group)
        object.__setattr__(self, "apart", apart)
        object.__setattr__(self, "site", call_site() if site is None else site)

    def policies(self) -> tuple[str, ...]:
        """Return the policy."""
        return (self.keep,) if isinstance(self.keep, str) else ()

    def check(self, graph: Graph) -> None:
        if type(self.group) is not int or self.group != 1:
            raise fail(self, 7, f"group={self.group!r} is not available; use group=1, so that each layer is made again alone")
        nodes = compute_nodes(self, graph, self.selection)
        _check_policy(self, graph.program, nodes)
        self._check_halves(graph, nodes)
        under = [n for n in nodes if isinstance(n.op, Compute) and n.op.keep != KEEP_ALL]
        if under:
            raise fail(self, 3, f"{names(graph, under)} is under a policy already; select each node once")
        if self.keep == KEEP_ALL:
            return
        chunks = list(dict.fromkeys(str(n.coords["chunk"]) for n in nodes))
        missing = [c for c in chunks if not graph.program.has_variant(c, self.keep)]
        if missing:
            made = "a synthetic program has none" if graph.program.source == "synthetic" else "piper.compile(job, ...) makes it"
            raise fail(self, 4, f"there is no code that makes tensors of {missing[0]} again: {made}")
        again = [v for c in chunks if _repeats(v := graph.program.chunk(variant_name(c, self.keep)))]
        if not again:
            raise fail(self, 6, f"backward needs nothing of {', '.join(chunks[:4])} that F would not keep; leave recompute out")
        self._check_buffers(graph.program, again)

    def _check_halves(self, graph: Graph, nodes: list[Node]) -> None:
        """Check condition 1."""
        selected = {(n.id, mb) for n in nodes for mb in n.each}
        for node in nodes:
            for other in _others(graph, node):
                left = [mb for mb in other.each if (other.id, mb) not in selected]
                if left:
                    message = f"{other.name(left[0])} is not selected, but {node.name(node.each[0])} is; leave phase out of where"
                    raise fail(self, 1, message)

    def _check_buffers(self, program: Program, variants: list[Chunk]) -> None:
        """Check condition 5."""
        changed = {o.ref for c in program.chunks for o in c.outputs if o.kind == "buffer"}
        for chunk in variants:
            read = [chunk.inputs[int(p[2:])] for p in chunk.steps["R"].reads if p.startswith("in")]
            for entry in read:
                if entry.kind == "buffer" and entry.ref in changed:
                    message = f"{chunk.id} reads buffer {entry.ref!r}, which the model changes in every microbatch, so that it "
                    raise fail(self, 5, message + "cannot be made again; leave this region out of where")

    def decided(self) -> Decided | None:
        """Return what it decides before it is compiled: nothing that bounds could use."""
        return None

    def apply(self, graph: Graph) -> Graph:
        if self.keep == KEEP_ALL:
            return graph
        edit = graph.edit()
        for forward in [n for n in graph.pick(self.selection) if n.coords["phase"] == "F"]:
            chunk = str(forward.coords["chunk"])
            variant = graph.program.chunk(variant_name(chunk, self.keep))
            if not _repeats(variant):
                continue
            edit.update(replace(forward, op=Compute(chunk, "F", self.keep)))
            known = dict(zip(value_reads(variant, "F"), forward.reads, strict=True))
            for backward in _others(graph, forward):
                edit.update(self._repeating(graph.program.chunk(chunk), variant, backward, known))
            if self.apart:
                reads = _reads(variant, value_reads(variant, "R"), known)
                coords = {**forward.coords, "phase": "R"}
                op = Compute(chunk, "R", self.keep)
                edit.add(Node(compute_id(chunk, "R"), op, coords, reads, (), forward.role, forward.stream, forward.mbs))
        return edit.done()

    def _repeating(self, chunk: Chunk, variant: Chunk, node: Node, known: Mapping[str, str]) -> Node:
        """Return a node of a backward that begins with R, if it is the first and R is no node of its own."""
        op = node.op
        assert isinstance(op, Compute)
        own = dict(zip(value_reads(chunk, op.step), node.reads, strict=True))
        reads = _reads(variant, value_reads(variant, op.step, self.apart), {**known, **own})
        return replace(node, op=Compute(chunk.id, op.step, self.keep, self.apart), reads=reads)


def policy_name(keep: str | tuple[str, ...]) -> str:
    """Return a policy as text: its name, or names of ops in one order, joined by "+"."""
    if isinstance(keep, tuple | list):
        return "+".join(sorted({str(name) for name in keep}))
    return keep


def _check_policy(item: Recompute, program: Program, nodes: list[Node]) -> None:
    """Check condition 2."""
    accepted = ", ".join(map(repr, POLICIES))
    if not isinstance(item.keep, str) or not item.keep:
        raise fail(item, 2, f"keep={item.keep!r}; {accepted} or a tuple of names of ops is accepted")
    if item.keep in POLICIES:
        return
    chunks = [program.chunk(id) for id in dict.fromkeys(str(n.coords["chunk"]) for n in nodes)]
    ops = sorted({k.op for c in chunks for k in c.steps["F"].cost.kernels})
    unknown = [name for name in item.keep.split("+") if name not in ops]
    if unknown:
        raise fail(
            item, 2, f"keep has {unknown[0]!r}, which is no op of the selected chunks; {accepted} or names of these are "
            f"accepted: {', '.join(ops) or 'there are none'}"
        )  # fmt: skip


def _repeats(variant: Chunk) -> bool:
    """Return whether R has something to do."""
    return bool(steps_of(variant, "R"))


def _others(graph: Graph, node: Node) -> Iterator[Node]:
    """Yield the other compute nodes of a node's chunk, in the microbatches that they share with it."""
    for phase in ("F", "B", "I", "W"):
        if phase != node.coords["phase"]:
            for other in graph.compute(str(node.coords["chunk"]), phase):
                shared = common(other.mbs, node.mbs)
                if shared is None or shared:
                    yield other if shared is None else in_mbs(other, shared)


def _reads(chunk: Chunk, ports: Iterable[str], known: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values behind ports; `known` are those that nodes read already, which may be copies."""
    return tuple([known.get(port) or port_value(chunk, port) for port in ports])
