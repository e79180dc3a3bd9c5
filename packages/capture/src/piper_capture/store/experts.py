"""Find the chunks that compute experts, and the values that they exchange with the rest of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod

from torch import fx

from piper_capture.chunks.dispatch import Dispatch, Dispatched
from piper_capture.graphs.stepgraph import Joint
from piper_capture.layouts import (
    BY_EXPERT,
    AskedIndexes,
    Nested,
    Sharded,
    experts_of,
    key_of,
    taken_apart,
    title,
    uneven,
    wants_whole,
)
from piper_capture.module.untagged_experts import SELECT_EXPERTS, way_to_experts
from piper_capture.steps.routed import Routed
from piper_capture.store.assemble import TRACE_ROWS
from piper_capture.store.captured import Captured
from piper_capture.store.expert_cuts import Cuts, cuts_of
from piper_ir.ground.errors import DirectiveError
from piper_ir.ground.sizes import Affine, TensorSpec
from piper_ir.program.layout import BOUND, EXPERTS, OVERFLOWS, Sharding
from piper_ir.program.program import Chunk

DimNests = Sequence[Nested]
ROW = Affine(0, 1)


def tokens_met(chunk: Chunk, joint: Joint, how: Routed) -> fx.Node | None:
    """Return an operation outside of the experts' that does not treat each token by itself; None if none does."""
    joint, apart = taken_apart(joint)
    tokens = {
        index
        for k, given in enumerate(chunk.inputs)
        if given.kind == "value" and (at := how.token_dim(given.spec)) is not None
        for index in apart.tensors[joint.inputs[k], 0][at]
    }
    gradients = {key_of(n) for k, n in joint.grads.items() if joint.kinds[k] == "param"}
    for node, op in apart.ops.items():
        if op.call.op in BY_EXPERT:
            continue
        met = tokens & {i for dims in (*op.tensors, *op.results) for dim in dims for i in dim}
        for index in met:
            has = op.parts(index)
            if has is None or not all(kept or (node, k) in gradients for k, kept in enumerate(has)):
                return node
    return None


class ExpertChunks:
    """Say how the chunks of a program exchange values if devices share experts.

    `captured` is cut at the regions of experts, and `params` are for each code and input its names. Raises
    DirectiveError for values that cannot be exchanged.
    """

    def __init__(
        self, captured: Captured, asked: Sharding, params: dict[str, tuple[tuple[str, ...], ...]]
    ) -> None:
        self.axis = asked.over
        self._captured, self._asked, self._params = captured, asked, params
        self._chunks = {c.id: c for c in captured.program.chunks}
        selected = asked.selection
        self._cut: dict[str, Cuts] = {}
        self._inside = {
            id
            for id, c in self._chunks.items()
            if selected is not None and selected.matches(c.coords)
        }
        if not self._inside:
            raise self._fail(f"{selected} selects no chunk; {way_to_experts(captured.program)}")
        recipe = captured.code.recipe
        self._routing = {
            c.id for c in self._experts_chunks if not self._refused(c) and recipe(c.code).routes
        }
        self._check_routing()
        self._nests = {
            c.code: self._experts(c) for c in self._experts_chunks if c.id not in self._routing
        }
        self._exchanged = {
            ref: how for c in captured.program.chunks for ref, how in self._crossings(c)
        }

    def _fail(self, message: str) -> DirectiveError:
        return DirectiveError(
            f"shard(over={self.axis!r}, index={', '.join(self._asked.index)!r}, stream='rows'): {message}"
        )

    @cached_property
    def _experts_chunks(self) -> list[Chunk]:
        return [c for id, c in self._chunks.items() if id in self._inside]

    def computes(self, chunk: Chunk) -> bool:
        """Return whether a chunk computes experts."""
        return chunk.id in self._inside

    def routes(self, chunk: Chunk) -> bool:
        """Return whether a chunk is a dropless mixture: devices trade rows inside of it."""
        return chunk.id in self._routing

    @cached_property
    def tokens(self) -> int:
        """Return the tokens of a row that dropless mixtures sort by expert; 0 without such mixtures."""
        each = {
            self._captured.code.recipe(self._chunks[id].code).routed_tokens for id in self._routing
        }
        return each.pop() if len(each) == 1 else 0

    def routed(self, chunk: Chunk, sharing: tuple[tuple[str, int], ...]) -> Routed:
        """Return how devices trade rows inside of a chunk; along the axes `sharing` they share the tokens of a row."""
        asked = self._asked
        axes = tuple(axis for axis, _ in asked.folded)
        how = Routed(
            self.axis, asked.degree, asked.bound, asked.overflow, self.tokens, sharing, axes,
            asked.hidden, beside=asked.beside,
        )  # fmt: skip
        if not asked.hidden:
            return how
        cuts = self._cuts(chunk, how)
        return replace(how, cuts=cuts.stacks, divided=cuts.divided)

    def _cuts(self, chunk: Chunk, how: Routed) -> Cuts:
        """Return where devices cut the experts of a chunk."""
        if chunk.code not in self._cut:
            joint = self._captured.code.joint(chunk.code, TRACE_ROWS[0][0])
            cuts = cuts_of(joint, how.within, how.cut_by)
            if isinstance(cuts, str):
                raise self._fail(
                    f"hidden={how.within!r}: {how.cut_by} devices cannot cut the experts of {chunk.id}: {cuts}"
                )
            self._cut[chunk.code] = cuts
        return self._cut[chunk.code]

    def check_tokens(self, sharing: tuple[tuple[str, int], ...]) -> None:
        """Raise DirectiveError for dropless mixtures whose tokens the devices of these axes cannot share."""
        if (self._asked.folded or self._asked.hidden) and self._routing != self._inside:
            way = (
                'such experts are cut by shard(where(), over="tp"), over devices that have the same tokens'
                if self._asked.hidden
                else "devices share such experts over one axis, and dropless ones over several"
            )
            raise self._fail(
                f"{min(self._inside - self._routing)} has places for so many tokens as its capacity says; {way}"
            )
        if not self._routing or not sharing:
            return
        devices, over = prod(n for _, n in sharing), ", ".join(axis for axis, _ in sharing)
        if not self.tokens or self.tokens % devices:
            raise self._fail(
                f"{min(self._routing)} sorts {self.tokens or 'several numbers of'} tokens of a row by expert, which "
                f"{devices} devices along {over} cannot share equally"
            )
        how = Routed(self.axis, self._asked.degree, 0.0, "", self.tokens, sharing)
        for code in dict.fromkeys(self._chunks[id].code for id in sorted(self._routing)):
            chunk = next(c for c in self._experts_chunks if c.code == code)
            if node := tokens_met(chunk, self._captured.code.joint(code, TRACE_ROWS[0][0]), how):
                raise self._fail(
                    f"{title(node)} of {chunk.id} needs all tokens of a row, which devices share over {over}; leave it "
                    f"out of the region"
                )

    def dispatch(self, chunk: Chunk) -> Dispatch:
        """Return the inputs and outputs that a chunk exchanges."""
        inputs = tuple(
            self._exchanged.get(i.ref) if i.kind == "value" else None for i in chunk.inputs
        )
        outputs = tuple(
            self._exchanged.get(f"{chunk.id}:out{k}") for k in range(len(chunk.outputs))
        )
        return Dispatch(inputs, outputs, self._asked.degree if self._trades(chunk.id) else 1)

    def _trades(self, id: str) -> bool:
        """Return whether a chunk of experts exchanges its inputs and outputs."""
        return id in self._inside and id not in self._routing

    def check(self, chunk: Chunk, made: Sharded) -> None:
        """Raise DirectiveError if devices cannot make the gradients of a chunk of experts by themselves."""
        own = {
            k: any(part.axis == self.axis for part in made.layout_of(k))
            for k in range(len(chunk.inputs))
        }
        if not any(own.values()):
            named = ", ".join(i.ref for i in chunk.inputs if i.kind == "param")
            raise self._fail(
                f"no device could have its own part of {named} in {chunk.id}: chunks outside use them, too"
            )
        for k, chunk_input in enumerate(chunk.inputs):
            if (
                chunk_input.kind == "param"
                and chunk_input.needs_grad
                and not own[k]
                and self.axis not in made.summed(k)
            ):
                raise self._fail(
                    f"parameter {chunk_input.ref!r} of {chunk.id} has no dimension of experts, and its gradient is no "
                    f"sum over them; leave it out of the region, or give each expert its own"
                )

    def check_steps(self, chunk: Chunk, body: Chunk) -> None:
        """Raise DirectiveError if a chunk of experts needs the experts of other devices in the middle of a step."""
        inside = (
            one
            for sig in body.steps.values()
            for one in sig.collectives
            if self.axis in one.axis.split("+")
        )
        if (one := next(inside, None)) is not None:
            raise self._fail(
                f"{chunk.id} needs all experts {one.why}; leave that out of the region"
            )

    def check_beside(self, chunk: Chunk, body: Chunk) -> None:
        """Raise DirectiveError if devices should compute while rows travel, and a chunk has nothing for that."""
        if not self._asked.beside:
            return
        if not self.routes(chunk):
            raise self._fail(
                f"beside=True: {chunk.id} has a capacity, and exchanges between chunks; leave it out, and see overlap"
            )
        if not body.steps["F"].overlaps:
            raise self._fail(
                f"beside=True: {chunk.id} computes nothing beside its experts; put shared experts into their region "
                f"(Experts(shared_within=True)), or leave it out"
            )

    def _refused(self, chunk: Chunk) -> bool:
        """Raise DirectiveError for a chunk that cannot be computed for the rows of other devices; return False."""
        outputs = next((o.kind for o in chunk.outputs if o.kind != "value"), "")
        for wrong, what in (
            (chunk.opaque, "is opaque"),
            (chunk.random, "draws random numbers, which would not be those of one device"),
            (
                any(i.kind == "batch" for i in chunk.inputs),
                "reads the batch, of which each device has its own rows",
            ),
            (bool(outputs), f"makes a {outputs}"),
        ):
            if wrong:
                way_out = (
                    "leave that out of the region of experts"
                    if EXPERTS in chunk.coords
                    else SELECT_EXPERTS
                )
                raise self._fail(f"{chunk.id} {what}; {way_out}")
        return False

    def _check_routing(self) -> None:
        """Raise DirectiveError for arguments that dropless mixtures do not take, or that only they take."""
        if self._routing and self._asked.index != (EXPERTS,):
            raise self._fail(
                f"devices share the experts of a dropless mixture ({min(self._routing)}); write index={EXPERTS!r}"
            )
        options = (
            ("bound", self._asked.bound, BOUND),
            ("overflow", self._asked.overflow, OVERFLOWS[0]),
        )
        named = [f"{name}={value!r}" for name, value, usual in options if value != usual]
        if named and not self._routing:
            raise self._fail(
                f"{' and '.join(named)}: only dropless mixtures take that, and {min(self._inside)} has places for "
                f"so many tokens as its capacity says; leave it out, or let the mixture drop none: "
                f"Experts(capacity_factor=None) of piper.models, or route and unroute of piper_ops in a model of your own"
            )

    def _experts(self, chunk: Chunk) -> tuple[list[DimNests], list[DimNests], Nested]:
        """Return the indexes of a chunk's inputs and outputs, and its experts."""
        joint, indexes = taken_apart(self._captured.code.joint(chunk.code, TRACE_ROWS[0][0]))
        params = self._params[chunk.code]
        input_dims: list[DimNests] = [indexes.tensors.get((node, 0), ()) for node in joint.inputs]
        output_dims: list[DimNests] = [
            indexes.tensors.get(key_of(node), ()) for node in joint.outputs
        ]
        nests = experts_of(joint, indexes, self._asked, params)
        if len(nests) == 1:
            if problem := uneven(nests[0], self._asked.degree):
                raise self._fail(f"the experts of {chunk.id}: {problem}")
            return input_dims, output_dims, nests[0]
        named = (
            i
            for name in self._asked.index
            for i in AskedIndexes((name,), params).named(joint, indexes, name)
        )
        for node, _ in filter(None, (wants_whole(indexes, i) for i in named)):
            raise self._fail(
                f"{title(node)} wants all experts of {chunk.id}; leave it out of the region"
            )
        subject = "several indexes are" if nests else "no index is"
        raise self._fail(
            f"{subject} called {', '.join(self._asked.index)!r} in {chunk.id}; experts are the first dimension of a "
            f"stack of weights [experts, m, n], in products with one matrix each (torch.bmm); index={EXPERTS!r} "
            f"names them"
        )

    def _crossings(self, chunk: Chunk) -> Iterator[tuple[str, Dispatched]]:
        """Yield the values that a chunk reads from the other side, with how they are exchanged."""
        for k, chunk_input in enumerate(chunk.inputs):
            if chunk_input.kind != "value":
                continue
            source, _, port = chunk_input.ref.rpartition(":")
            if self._trades(source) == self._trades(chunk.id):
                continue
            number = int(port.removeprefix("out"))
            inside = chunk if self._trades(chunk.id) else self._chunks[source]
            inputs, outputs, nest = self._nests[inside.code]
            yield (
                chunk_input.ref,
                self._dims(
                    chunk_input.ref,
                    chunk_input.spec,
                    inputs[k] if inside is chunk else outputs[number],
                    nest,
                ),
            )

    def _dims(self, ref: str, spec: TensorSpec, dims: DimNests, nest: Nested) -> Dispatched:
        """Return which dimensions of a value have the experts and the rows."""
        experts = [d for d, inside in enumerate(dims) if any(i in nest for i in inside)]
        rows = [d for d, size in enumerate(spec.shape) if isinstance(size, Affine)]
        if len(experts) != 1 or tuple(dims[experts[0]]) != nest:
            raise self._fail(
                f"{ref} ({spec}) passes between experts and the rest, and no dimension of it is that of the "
                f"experts; let tokens pass as [rows, experts, places, width]"
            )
        if len(rows) != 1 or spec.shape[rows[0]] != ROW:
            raise self._fail(
                f"{ref} ({spec}) passes between experts and the rest, and no dimension of it is that of the rows "
                f"alone; let tokens pass as [rows, experts, places, width]"
            )
        return Dispatched(experts[0], rows[0])
