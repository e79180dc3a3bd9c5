"""Define `offload`: keep tensors of chunks in the memory of the host.

The tensors that a backward needs wait for it there:

    before  layer1.F@0 (saves tensors) -> layer1.B@0
    after   layer1.F@0 -> to_host -> from_host -> layer1.B@0        offload(where(layer=1))

Each copy runs beside compute, on the stream "to_host" or "from_host" of its device. The device's memory of a tensor is
free when its copy has ended; it is taken again when the tensor is brought back, `prefetch` backwards of offloaded
chunks ahead of its first reader. A tensor that would come back at once stays, as in the last layers before the loss. A
tensor that chunks hand on stays, too, if the backward of a chunk that is not selected reads it.

With `modules` only tensors move that a forward saves and that operations inside of these modules make: the ones that
recompute(keep="inputs", modules=modules) would make again. Capture makes that variant to tell them.

With tensors="optim" the optimizer of the selected chunks runs on the host, which alone keeps its states and the
parameters that it updates (masters). Its Update copies the gradients there, and the updated parameters back, in the
dtype of forward and backward (ZeRO-Offload; Ren et al., 2021). With tensors="states" the parameters stay on the
host, too: they are copied to the device ahead of each use, or with zero=3 this rank's shard ahead of each gather.

Legality
 1. Forward and backward of the selected chunks are selected, in all microbatches.
 2. `tensors` is "all", "saved", "inputs", "optim" or "states".
 3. `prefetch` is an integer of at least 0, and `least_mb` a number of at least 0.
 4. No selected chunk is offloaded already; its optimizer and its other tensors may be, by two directives.
 5. The program is of a captured model; a synthetic program has no tensors that wait.
 6. No selected chunk is opaque, unless states are moved: autograd holds its tensors itself.
 7. The backward of a selected chunk needs a tensor of that kind; for states a selected chunk trains parameters.
 8. Each of `modules` is a pattern that matches a module that the model runs, which the capture checks; `tensors` is
    not "inputs" beside it.
 9. For states prefetch, least_mb and modules are not given: all states of the chunks stay on the host.
10. With tensors="states" ranks shard the parameters with the optimizer's states (zero=3), or none of them (zero=0).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

from piper_compiler.directives.base import (
    as_names,
    compute_nodes,
    directive,
    fail,
    site_field,
)
from piper_compiler.directives.decided import Decided
from piper_compiler.directives.prepare import CaptureRequest, Preparation, by_layers
from piper_compiler.directives.recompute import policy_name
from piper_compiler.directives.unwritten import ASKED_FOR
from piper_compiler.ports import kept_inside, trains, value_reads
from piper_ir.graph.graph import Graph, Node, Offloading
from piper_ir.graph.graph_parts import without
from piper_ir.ground.select import Where
from piper_ir.program.ops import Compute

MB = 1 << 20
OPTIM, STATES = "optim", "states"
TENSORS = ("all", "saved", "inputs", OPTIM, STATES)


@directive
@dataclass(frozen=True)
class Offload:
    """Move tensors of the selected chunks to the memory of the host after their last use in forward.

    Attributes:
        prefetch: how many backwards of offloaded chunks ahead of its first reader a tensor is brought back.
        tensors: "saved" by the forward of a chunk for its backward; "inputs": activations that chunks hand on and the
            backward reads again, as the inputs of a recomputed layer; "all" of these. "optim": the states of the
            optimizer and the parameters that it updates, which never leave the host. "states": these, and the
            parameters that forward and backward read, or this rank's shards of them.
        least_mb: MiB that a tensor has at least; smaller ones stay on the device.
        modules: patterns of the names of the modules whose tensors move; () for all.
        site: where the user wrote it.
    """

    selection: Where
    prefetch: int = 1
    tensors: str = "all"
    least_mb: float = 1.0
    modules: tuple[str, ...] = ()
    site: str = site_field()

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", as_names(self.modules))

    @property
    def told_by(self) -> str:
        """Return the policy of recomputation under which a forward saves all but the tensors of `modules`."""
        return policy_name(ASKED_FOR, self.modules)

    def prepare(self, request: CaptureRequest, seen: Preparation) -> CaptureRequest:
        """Ask for layers if parameters leave the device, and for the variants that tell the tensors of `modules`."""
        if self.tensors == STATES:
            return by_layers(request, seen)
        if self.modules == ():
            return request
        self._check_modules()
        return request.under(self.told_by)

    def _check_modules(self) -> None:
        """Check condition 8 as far as capture does not."""
        strings = isinstance(self.modules, tuple) and all(
            isinstance(m, str) and m for m in self.modules
        )
        if not strings:
            raise fail(
                self, 8, f"modules={self.modules!r}; names of modules such as '*.mlp' are expected"
            )
        if self.modules and self.tensors == "inputs":
            raise fail(
                self, 8, 'tensors="inputs" are made by other layers; leave tensors or modules out'
            )

    def check(self, graph: Graph) -> None:
        self._check_numbers()
        self._check_modules()
        nodes = compute_nodes(self, graph, self.selection)
        chunks = _chunks(nodes)
        self._check_whole(graph, nodes, chunks)
        if self.tensors in (OPTIM, STATES):
            self._check_states(graph, chunks)
        else:
            self._check_waiting(graph, chunks)

    def _check_states(self, graph: Graph, chunks: tuple[str, ...]) -> None:
        """Check conditions 4, 7 and 9 of states on the host."""
        if already := tuple(c for c in chunks if c in graph.hosted):
            text = f"the optimizer of {already[0]} is on the host already; select each chunk once"
            raise fail(self, 4, text, already)
        if not any(trains(graph.program.chunk(c)) for c in chunks):
            text = f"{', '.join(chunks[:4])} trains no parameters; leave offload out"
            raise fail(self, 7, text)
        settings = (("prefetch", 1), ("least_mb", 1.0), ("modules", ()))
        given = [name for name, default in settings if getattr(self, name) != default]
        if given:
            text = f'{", ".join(given)} beside tensors="{self.tensors}"; states do not move, so leave it out'
            raise fail(self, 9, text)

    def _check_waiting(self, graph: Graph, chunks: tuple[str, ...]) -> None:
        """Check conditions 4 to 7 of tensors that wait for a backward."""
        if already := tuple(c for c in chunks if c in graph.offloading):
            raise fail(
                self, 4, f"{already[0]} is offloaded already; select each chunk once", already
            )
        if graph.program.source == "synthetic":
            raise fail(
                self,
                5,
                "a synthetic program has no tensors that wait for a backward; leave offload out",
            )
        if opaque := tuple(c for c in chunks if graph.program.chunk(c).opaque):
            raise fail(
                self,
                6,
                f"{opaque[0]} is opaque, so that autograd holds its tensors; leave it out of where",
                opaque,
            )
        if not any(self._moves(graph, c) for c in chunks):
            kind = "tensor" if self.tensors == "all" else f'tensor of the kind "{self.tensors}"'
            raise fail(
                self,
                7,
                f"the backward of {', '.join(chunks[:4])} needs no {kind}; leave offload out",
            )

    def _check_numbers(self) -> None:
        """Check conditions 2 and 3."""
        if self.tensors not in TENSORS:
            raise fail(
                self, 2, f"tensors={self.tensors!r}; {', '.join(map(repr, TENSORS))} are accepted"
            )
        if type(self.prefetch) is not int or self.prefetch < 0:
            raise fail(self, 3, f"prefetch={self.prefetch!r}; an integer of at least 0 is expected")
        least = self.least_mb
        if type(least) not in (int, float) or not isfinite(least) or least < 0:
            raise fail(self, 3, f"least_mb={least!r}; a number of MiB of at least 0 is expected")

    def _check_whole(self, graph: Graph, nodes: list[Node], chunks: tuple[str, ...]) -> None:
        """Check condition 1."""
        selected: dict[str, list[Node]] = {}
        for node in nodes:
            selected.setdefault(node.id, []).append(node)
        for node in (n for c in chunks for n in _nodes(graph, c)):
            left = node.mbs
            for other in selected.get(node.id, ()):
                left = (
                    without(left, other.mbs) if left is not None and other.mbs is not None else None
                )
            if left or node.id not in selected:
                missing = node.name(left[0] if left else node.each[0])
                raise fail(
                    self,
                    1,
                    f"{missing} is not selected, but others of its chunk are; leave phase and mb out of where",
                )

    def _moves(self, graph: Graph, chunk: str) -> bool:
        """Return whether the backward of a chunk needs a tensor of the selected kind."""
        for node in _nodes(graph, chunk):
            op = node.op
            assert isinstance(op, Compute)
            variant = graph.program.chunk(op.variant)
            if op.step == "F":
                if self.tensors != "inputs" and kept_inside(
                    graph.program, variant, self._policy().told_by
                ):
                    return True
            elif self._policy().tensors != "saved" and _handed_on(graph, node):
                return True
        return False

    def decided(self) -> Decided | None:
        """Return its decisions before it is compiled; which tensors move, and when, is known in order only.

        Bounds of states count them on the device, so there are none where the optimizer is on the host.
        """
        return None if self.tensors in (OPTIM, STATES) else Decided(away=True)

    def apply(self, graph: Graph) -> Graph:
        edit = graph.edit()
        chunks = _chunks(graph.pick(self.selection))
        if self.tensors in (OPTIM, STATES):
            edit.hosted = (*edit.hosted, *chunks)
            edit.away = (*edit.away, *(chunks if self.tensors == STATES else ()))
            return edit.done()
        edit.offloading.update(dict.fromkeys(chunks, self._policy()))
        return edit.done()

    def _policy(self) -> Offloading:
        tensors, told_by = ("saved", self.told_by) if self.modules else (self.tensors, "")
        return Offloading(tensors, int(self.least_mb * MB), self.prefetch, told_by)


def _chunks(nodes: list[Node]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(node.coords["chunk"]) for node in nodes))


def _nodes(graph: Graph, chunk: str) -> Iterator[Node]:
    """Yield the compute nodes of a chunk."""
    for step in ("F", "R", "B", "I", "W"):
        yield from graph.compute(chunk, step)


def _handed_on(graph: Graph, node: Node) -> bool:
    """Return whether a backward reads an activation that a chunk hands on."""
    op = node.op
    assert isinstance(op, Compute)
    ports = value_reads(graph.program.chunk(op.variant), op.step, op.apart)
    return any(
        port.startswith(("in", "out"))
        and graph.values[v].category == "activation"
        and v in graph.writers
        for port, v in zip(ports, node.reads, strict=True)
    )
