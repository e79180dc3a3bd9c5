"""Define `recompute`: save fewer tensors from forward to backward, and make the others again before the backward.

    before  layer1.F@0 (saves all tensors that I and W need) -> layer1.B@0: I, W
    after   layer1.F@0 (saves as `keep` says) -> layer1.B@0: R, I, W        recompute(where(layer=1), keep="inputs")

With `apart` R is a node of its own, layer1.R@0, before layer1.B@0: `order` may name it by phase="R", so that it runs in
a bubble before the gradient arrives. An R that no order names waits for the inputs of its backward.

Chunks that no `recompute` selects may be under a policy all the same, see `unwritten`; keep="all" keeps them out of it.

With `modules` the policy holds for tensors that are made inside of modules with these names, and F saves all others. It
is part of the policy's name: keep="inputs", modules=("*.mlp",) is keep="inputs@*.mlp". Several policies may stand
beside each other, as in keep="inputs@*.norm1&outputs@*.core"; an operation is under the first that has its module.

With group=k only the inputs of every k-th layer are saved: R of a layer also makes the output again that R of the next
one reads, as value layer1:out0!r. These R are nodes of their own.

Legality
 1. Forward and backward are selected alike: a policy holds for both.
 2. `keep` is "all", "products", "products/n", "attention", "inputs", "outputs" beside `modules`, or names
    of ops that the selected chunks run.
 3. No selected node is under a policy already.
 4. The program is of a captured model, for which capture makes R, or synthetic with seconds of R and keep="inputs".
 5. R reads no buffer that the model changes while it runs, since by then the buffer has other content.
 6. There is something to make again, unless keep is "all".
 7. `group` is a number of layers, at least 1; with more than 1 the nodes are placed already, and `modules` is left
    out: R of a part of a layer does not make its output again.
 8. Each of `modules` is a pattern that matches a module that the model runs, which the capture checks; `keep` is not
    "all".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from piper_compiler.directives.base import (
    as_names,
    call_site,
    compute_nodes,
    directive,
    fail,
    names,
    site_field,
)
from piper_compiler.directives.decided import Decided
from piper_compiler.directives.prepare import CaptureRequest, Preparation
from piper_compiler.ports import AGAIN, port_value, steps_of, value_reads, value_writes
from piper_ir.graph.graph import Coord, Editor, Graph, Node
from piper_ir.graph.graph_parts import common, in_mbs
from piper_ir.ground.node_ids import compute_id
from piper_ir.ground.select import Where
from piper_ir.program.ops import (
    BESIDE,
    EVERY,
    HANDS_ON,
    KEEP_ALL,
    WITHIN,
    Compute,
    variant_name,
)
from piper_ir.program.program import Chunk, Program

POLICIES = (KEEP_ALL, "products", "attention", "outputs", "inputs")
"""The policies that have a name; any other is "products/n", or names of ops, joined by "+"."""


def changed_buffers(program: Program) -> set[str]:
    """Return the buffers that the model changes while it runs."""
    return {o.ref for c in program.chunks for o in c.outputs if o.kind == "buffer"}


def may_repeat(variant: Chunk, changed: Collection[str]) -> bool:
    """Return whether R has something to make again, and reads no buffer that the model has changed by then."""
    read = (
        [variant.inputs[int(p[2:])] for p in variant.steps["R"].reads if p.startswith("in")]
        if _repeats(variant)
        else []
    )
    return _repeats(variant) and not any(
        entry.kind == "buffer" and entry.ref in changed for entry in read
    )


@directive
@dataclass(frozen=True, init=False)
class Recompute:
    """Put the selected chunks and microbatches under a policy of recomputation.

    Attributes:
        keep: the policy: the tensors that F saves for backward, and the modules to which that is limited.
        group: the number of layers that are recomputed together.
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
        *,
        modules: str | tuple[str, ...] = (),
    ) -> None:
        object.__setattr__(self, "selection", selection)
        object.__setattr__(self, "keep", policy_name(keep, modules))
        object.__setattr__(self, "group", group)
        object.__setattr__(self, "apart", apart)
        object.__setattr__(self, "site", call_site() if site is None else site)

    def policies(self) -> tuple[str, ...]:
        """Return the policy, and the policy of chunks whose outputs are made again for the next chunk of a group."""
        if self.keep == KEEP_ALL or _misspelt(self.keep):
            return ()
        alone = self.group == 1 or WITHIN in self.keep
        return (self.keep,) if alone else (self.keep, self.keep + HANDS_ON)

    def prepare(self, request: CaptureRequest, seen: Preparation) -> CaptureRequest:
        """Ask for variants of chunks that compute saved tensors again."""
        return request.under(*self.policies())

    def check(self, graph: Graph) -> None:
        if type(self.group) is not int or self.group < 1:
            raise fail(self, 7, f"group={self.group!r}; a number of layers is expected, at least 1")
        nodes = compute_nodes(self, graph, self.selection)
        _check_policy(self, graph.program, nodes)
        if self.group > 1 and WITHIN in self.keep:
            raise fail(
                self,
                7,
                "a group makes whole layers again, and modules= parts of them; leave one of the two out",
            )
        if self.group > 1 and graph.mesh.size("pp") > 1 and not all(n.role for n in nodes):
            raise fail(
                self,
                7,
                f"a group runs on one device, and {names(graph, nodes)} is not placed; write recompute after place",
            )
        self._check_halves(graph, nodes)
        under = [n for n in nodes if isinstance(n.op, Compute) and n.op.keep != KEEP_ALL]
        if under:
            raise fail(
                self, 3, f"{names(graph, under)} is under a policy already; select each node once"
            )
        if self.keep == KEEP_ALL:
            return
        chunks = list(dict.fromkeys(str(n.coords["chunk"]) for n in nodes))
        missing = [
            c for c in chunks if not all(graph.program.has_variant(c, p) for p in self.policies())
        ]
        if missing:
            synthetic = graph.program.source == "synthetic"
            advice = (
                'a synthetic program has it for "inputs", with R=...'
                if synthetic
                else "piper.compile(job, ...) makes it"
            )
            raise fail(
                self, 4, f"there is no code that makes tensors of {missing[0]} again: {advice}"
            )
        groups = self._groups(graph)
        if not groups:
            raise fail(
                self,
                6,
                f"backward needs nothing of {', '.join(chunks[:4])} that F would not keep; leave recompute out",
            )
        self._check_buffers(
            graph.program,
            [self._variant(graph, node, keep) for group in groups for node, keep in group],
        )

    def _check_halves(self, graph: Graph, nodes: list[Node]) -> None:
        """Check condition 1."""
        selected = {(n.id, mb) for n in nodes for mb in n.each}
        for node in nodes:
            for other in _others(graph, node):
                left = [mb for mb in other.each if (other.id, mb) not in selected]
                if left:
                    message = (
                        f"{other.name(left[0])} is not selected, but {node.name(node.each[0])} is; "
                        f"leave phase out of where"
                    )
                    raise fail(self, 1, message)

    def _check_buffers(self, program: Program, variants: list[Chunk]) -> None:
        """Check condition 5."""
        changed = changed_buffers(program)
        for chunk in variants:
            read = [chunk.inputs[int(p[2:])] for p in chunk.steps["R"].reads if p.startswith("in")]
            for entry in read:
                if entry.kind == "buffer" and entry.ref in changed:
                    message = (
                        f"{chunk.id} reads buffer {entry.ref!r}, which the model changes in every "
                        f"microbatch, so that it "
                    )
                    raise fail(
                        self, 5, message + "cannot be made again; leave this region out of where"
                    )

    def decided(self) -> Decided | None:
        """Return its decisions before it is compiled; None if microbatches are under different policies."""
        return None if any(name == "mb" for name, _ in self.selection.terms) else Decided(self)

    def apply(self, graph: Graph) -> Graph:
        if self.keep == KEEP_ALL:
            return graph
        edit = graph.edit()
        for group in self._groups(graph):
            again: dict[str, str] = {}
            for forward, keep in group:
                self._repeat(graph, edit, forward, keep, again)
        return edit.done()

    def _groups(self, graph: Graph) -> list[list[tuple[Node, str]]]:
        """Return the selected forwards in groups that are made again together, each with its policy.

        A chunk whose backward needs nothing, as of an addition, is made again for the next chunk of its group alone; if
        it cannot be, its group ends.
        """
        inside, last, changed = self.policies()[-1], self.keep, changed_buffers(graph.program)
        forwards = [
            n
            for n in graph.pick(self.selection)
            if n.coords["phase"] == "F"
            and (
                _repeats(self._variant(graph, n, last))
                or may_repeat(self._variant(graph, n, inside), changed)
            )
        ]
        groups = []
        for group in grouped(forwards, graph, self.group):
            while group and not _repeats(self._variant(graph, group[-1], last)):
                group.pop()
            if group:
                groups.append([*((n, inside) for n in group[:-1]), (group[-1], last)])
        return groups

    def _variant(self, graph: Graph, node: Node, keep: str) -> Chunk:
        return graph.program.chunk(variant_name(str(node.coords["chunk"]), keep))

    def _repeat(
        self, graph: Graph, edit: Editor, forward: Node, keep: str, again: dict[str, str]
    ) -> None:
        """Put the nodes of a chunk under a policy.

        `again` names the values that R of earlier chunks of the group makes again, each with its second name; this
        chunk's values are added.
        """
        variant, chunk = (
            self._variant(graph, forward, keep),
            graph.program.chunk(str(forward.coords["chunk"])),
        )
        apart = self.apart or keep.endswith(HANDS_ON)
        known = dict(zip(value_reads(chunk, "F"), forward.reads, strict=True))
        edit.update(replace(forward, op=Compute(chunk.id, "F", keep)))
        if apart:
            reads = _reads(variant, value_reads(variant, "R"), known, again)
            writes = tuple(
                edit.value(f"{chunk.id}:{p}{AGAIN}", variant.ports[p], "activation")
                for p in value_writes(variant, "R")
            )
            coords = {**forward.coords, "phase": "R"}
            step = Compute(chunk.id, "R", keep)
            edit.add(
                Node(
                    compute_id(chunk.id, "R"),
                    step,
                    coords,
                    reads,
                    writes,
                    forward.role,
                    forward.stream,
                    forward.mbs,
                )
            )
            again.update({v.removesuffix(AGAIN): v for v in writes})
        for node in _others(graph, forward):
            op = node.op
            assert isinstance(op, Compute)
            own = {**known, **dict(zip(value_reads(chunk, op.step), node.reads, strict=True))}
            reads = _reads(variant, value_reads(variant, op.step, apart), own, again)
            edit.update(replace(node, op=Compute(chunk.id, op.step, keep, apart), reads=reads))


def grouped(forwards: list[Node], graph: Graph, layers: int) -> Iterator[list[Node]]:
    """Yield the forwards in groups of up to so many layers that follow one on another in one place."""
    places: dict[tuple[Coord, ...], list[Node]] = {}
    for node in forwards:
        places.setdefault((node.role, node.coords.get("stage", ""), str(node.mbs)), []).append(node)
    for nodes in places.values():
        group: list[Node] = []
        for node in nodes:
            inside = {n.coords.get("layer") for n in group}
            last = graph.chunk_index[str(group[-1].coords["chunk"])] if group else -1
            follows = (
                graph.chunk_index[str(node.coords["chunk"])] == last + 1 and None not in inside
            )
            fits = node.coords.get("layer") in inside or (
                "layer" in node.coords and len(inside) < layers
            )
            if group and not (layers > 1 and follows and fits):
                yield group
                group = []
            group.append(node)
        yield group


def policy_name(keep: str | tuple[str, ...], modules: str | tuple[str, ...] = ()) -> str:
    """Return a policy as text: its name, or names of ops joined by "+", and likewise the patterns of its modules."""
    name = _joined(keep) if isinstance(keep, tuple | list) else keep
    if modules == ():
        return name
    patterns = as_names(modules)
    return f"{name}{WITHIN}{_joined(patterns if isinstance(patterns, tuple) else (patterns,))}"


def _joined(names: Iterable[object]) -> str:
    return "+".join(sorted({str(name) for name in names}))


def _accepted() -> str:
    return ", ".join(map(repr, (*POLICIES, f"products{EVERY}2")))


def _misspelt(keep: str) -> tuple[int, str] | None:
    """Return the condition that the form of a policy breaks, and the problem; None if it breaks none."""
    accepted = f"keep={keep!r}; {_accepted()} or a tuple of names of ops is accepted"
    if not isinstance(keep, str):
        return 2, accepted
    for one in keep.split(BESIDE):
        policy, within, modules = one.partition(WITHIN)
        name, mark, every = policy.partition(EVERY)
        if not name:
            return 2, accepted
        if mark and not (name == "products" and every.isdecimal() and int(every)):
            return 2, f"keep={keep!r}; one of n products is kept as in 'products{EVERY}2'"
        if not within and (name == "outputs" or BESIDE in keep):
            return 2, f"{policy!r} is about parts of layers; give modules=, or {_accepted()}"
        if within and (name == KEEP_ALL or not all(modules.split("+"))):
            return 8, (
                f"keep={policy!r} with modules={modules!r}; names of modules such as '*.mlp' are expected, and "
                f"another keep than 'all'"
            )
    return None


def _check_policy(item: Recompute, program: Program, nodes: list[Node]) -> None:
    """Check conditions 2 and 8."""
    if problem := _misspelt(item.keep):
        raise fail(item, *problem)
    for one in item.keep.split(BESIDE):
        keep = one.partition(WITHIN)[0]
        if keep.partition(EVERY)[0] not in POLICIES:
            _check_ops(item, keep, program, nodes)


def _check_ops(item: Recompute, keep: str, program: Program, nodes: list[Node]) -> None:
    """Check condition 2 for names of ops."""
    accepted = _accepted()
    chunks = [program.chunk(id) for id in dict.fromkeys(str(n.coords["chunk"]) for n in nodes)]
    ops = sorted({k.op for c in chunks for k in c.steps["F"].cost.kernels})
    unknown = [name for name in keep.split("+") if name not in ops]
    if unknown:
        raise fail(
            item, 2, f"keep has {unknown[0]!r}, which is no op of the selected chunks; {accepted} or names of "
                     f"these are accepted: {', '.join(ops) or 'there are none'}"
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


def _reads(
    chunk: Chunk, ports: Iterable[str], known: Mapping[str, str], again: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the values behind ports; `known` are the values that nodes read already, which may be copies."""
    values = [known.get(port) or port_value(chunk, port) for port in ports]
    return tuple([again.get(value, value) for value in values])
