"""Make a captured program for devices that share the work of its chunks (tensor parallelism), or experts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from piper_capture.chunks.tables import (
    constant_values,
    flat_values,
    masks,
    with_flat,
    with_tables,
)
from piper_capture.chunks.ties import Ties
from piper_capture.graphs.stepgraph import Joint
from piper_capture.layouts import (
    Agreed,
    NamedIndexes,
    Sharded,
    check_asked,
    common_degrees,
    ordered,
    split_degrees,
    with_flat_tokens,
)
from piper_capture.steps.routed import RoutedLayouts
from piper_capture.store.assemble import TRACE_ROWS, with_experts
from piper_capture.store.captured import Captured
from piper_capture.store.experts import ExpertChunks
from piper_capture.store.refitted import refitted, traced_at
from piper_capture.store.sharing_cuts import with_seams
from piper_ir.ground.errors import DirectiveError
from piper_ir.program.layout import TOKENS, Sharding
from piper_ir.program.program import Chunk, Param, Program


def with_shardings(
    captured: Captured, shardings: Sequence[Sharding], rows: int | None = None
) -> Captured:
    """Return a capture whose chunks are the shards of one device among the devices that share them.

    Every code is rewritten once, not captured again. With `rows`, sizes need to hold at that number of rows alone,
    which takes fewer traces. Raises DirectiveError, with the indexes that can be shared, if others are asked for.
    """
    asked = tuple(shardings)
    if not asked:
        return captured
    key = asked, rows or 0
    rewritten = captured.shared.get(key) or captured.shared.get((asked, 0))
    if rewritten is None:
        rewritten = captured.shared[key] = _made(captured, asked, rows)
    return rewritten


def cut_at_experts(captured: Captured) -> Captured:
    """Return the same capture, cut at the regions of experts."""
    if ((), 0) not in captured.shared:
        captured.shared[(), 0] = with_experts(captured)
    return captured.shared[(), 0]


def _made(captured: Captured, asked: tuple[Sharding, ...], rows: int | None) -> Captured:
    wanted = next((one for one in asked if one.experts), None)
    if wanted is None:
        split = _split(captured, asked)
        seams = any(one.cut for one in split)
        return _Shared(
            with_seams(captured, split, params_of(captured.program)) if seams else captured,
            split,
            rows,
        ).captured()
    apart = cut_at_experts(captured)
    params = params_of(apart.program)
    expert_chunks = ExpertChunks(apart, wanted, params)
    others = _split(apart, tuple(s for s in asked if not s.experts), expert_chunks)
    parts = {s.over: s.axes for s in others if len(s.split) > 1}
    if any(axis in parts for axis, _ in (*wanted.axes, *wanted.hidden)):
        folded, hidden = (
            tuple(one for axis in axes for one in parts.get(axis[0], (axis,)))
            for axes in (wanted.axes, wanted.hidden)
        )
        wanted = replace(wanted, folded=folded if len(folded) > 1 else (), hidden=hidden)
        expert_chunks = ExpertChunks(apart, wanted, params)
    expert_chunks.check_tokens(_token_axes(others))
    return _Shared(apart, (*others, wanted), rows, expert_chunks).captured()


def _token_axes(asked: Sequence[Sharding]) -> tuple[tuple[str, int], ...]:
    """Return the axes whose devices share the tokens of a row, with their sizes."""
    return tuple(axis for s in asked if s.context or s.stream == TOKENS for axis in s.axes)


def _shares_tokens(asked: Sequence[Sharding]) -> str:
    """Return the user's setting that shares the tokens of all ops, or between layers; "" without one."""
    for one in asked:
        if one.context:
            return f'shard(index="tokens", over={one.over!r})'
        if one.stream == TOKENS:
            return 'stream="tokens"'
    return ""


def _split(
    captured: Captured, asked: tuple[Sharding, ...], experts: ExpertChunks | None = None
) -> tuple[Sharding, ...]:
    """Return the shardings, each with the degrees that its axis must be split into to fit all chunks.

    Raises DirectiveError for indexes that the user names and devices cannot share.
    """
    if not asked:
        return ()
    params = params_of(captured.program)
    joints = {code: captured.code.joint(code, TRACE_ROWS[0][0]) for code in params}
    if experts is not None and experts.tokens and _shares_tokens(asked):
        flat = flat_values(captured.program, experts.tokens)
        for chunk in captured.program.chunks:
            if experts.routes(chunk):
                joints.pop(chunk.code, None)
            elif chunk.code in joints:
                agreed = with_flat(Agreed(), chunk, flat, experts.tokens)
                joints[chunk.code] = with_flat_tokens(joints[chunk.code], agreed)
    if experts is not None:  # what devices exchange has no tokens, and need not divide as they do
        for chunk in captured.program.chunks:
            if chunk.code in joints:
                given, made = experts.dispatch(chunk).exchanged
                joint = joints[chunk.code]
                joints[chunk.code] = replace(joint, exchanged_inputs=given, exchanged_outputs=made)
    ids = {c.code: c.id for c in reversed(captured.program.chunks)}
    asked = tuple(ordered(one, joints.values()) if one.context else one for one in asked)
    for one in asked:
        if one.index:
            check_asked(
                {ids[code]: NamedIndexes.of(j, params[code]) for code, j in joints.items()}, one
            )
    each = [split_degrees(joint, asked, params[code]) for code, joint in joints.items()]
    degrees = [common_degrees([found[number] for found in each]) for number in range(len(asked))]
    return tuple(
        replace(one, split=found) if len(found) > 1 else one
        for one, found in zip(asked, degrees, strict=True)
    )


def params_of(program: Program) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Return for each code, opaque ones left out, and for each input its names in the chunks that have the code."""
    having: dict[str, list[Chunk]] = {}
    for chunk in program.chunks:
        if not chunk.opaque:
            having.setdefault(chunk.code, []).append(chunk)
    return {
        code: tuple(
            tuple(dict.fromkeys(i.ref for i in same))
            for same in zip(*(c.inputs for c in chunks), strict=True)
        )
        for code, chunks in having.items()
    }


class _Shared:
    def __init__(
        self,
        captured: Captured,
        asked: tuple[Sharding, ...],
        rows: int | None,
        experts: ExpertChunks | None = None,
    ) -> None:
        self._captured, self._asked, self._experts = captured, asked, experts
        self._rows = rows
        self._bodies: dict[str, Chunk] = {}
        self._params_of = params_of(captured.program)
        self._tokens = _shares_tokens(asked)
        streams = bool(self._tokens)
        self._constants = (
            constant_values(captured.program, self._joint) if streams else frozenset[str]()
        )
        self._masks = masks(captured.program, self._joint) if streams else frozenset[str]()
        self._flat, self._row_tokens = frozenset[str](), 0
        if experts is not None and streams:
            self._row_tokens = experts.tokens
            self._flat = flat_values(captured.program, experts.tokens)
            self._constants -= self._flat
        self._ties = Ties(captured.program, self._layouts)

    def captured(self) -> Captured:
        program = self._captured.program
        self._check_opaque()
        self._ties.settle()
        chunks = tuple(self._chunk(c) for c in program.chunks)
        axes = tuple(axis for s in self._asked if not s.experts for axis in s.axes)
        of_experts = (a for s in self._asked if s.experts for a in (*s.hidden, *s.axes))
        along = tuple(axis for axis in of_experts if axis not in axes)
        params = self._params(program.params, chunks, {axis for axis, _ in along})
        shared_program = replace(
            program, chunks=chunks, params=params, axes=axes, experts=along, variants=()
        )
        return replace(
            self._captured,
            program=shared_program,
            under={},
            shared={},
            unshared=self._ties.unshared(),
        )

    def _check_opaque(self) -> None:
        for chunk in self._captured.program.chunks:
            if chunk.opaque and self._tokens:
                raise DirectiveError(
                    f"chunk {chunk.id!r} has an opaque region, which needs all tokens on each device, and "
                    f"{self._tokens} shares them; leave the region out (piper.tag without opaque=True), or "
                    f"leave {self._tokens} out"
                )

    def _joint(self, chunk: Chunk) -> Joint:
        return self._captured.code.joint(chunk.code, TRACE_ROWS[0][0])

    def _routes(self, chunk: Chunk) -> bool:
        return self._experts is not None and self._experts.routes(chunk)

    def _asked_of(self, chunk: Chunk) -> tuple[Sharding, ...]:
        """Return the shardings that are asked for a chunk: none for an opaque one."""
        if chunk.opaque:
            return ()
        return tuple(
            s
            for s in self._asked
            if not s.experts or (self._experts is not None and self._experts.computes(chunk))
        )

    def _code(self, chunk: Chunk, agreed: Agreed) -> str:
        store, asked, code = self._captured.code, self._asked_of(chunk), chunk.code
        if self._experts is not None and self._routes(chunk):
            return store.routed(code, self._experts.routed(chunk, _token_axes(self._asked)))
        agreed = with_tables(agreed, chunk, self._constants, self._masks)
        agreed = with_flat(agreed, chunk, self._flat, self._row_tokens)
        if any(one.cut for one in asked):
            agreed = replace(
                agreed, open=frozenset(k for k, o in enumerate(chunk.outputs) if o.kind == "value")
            )
        if self._experts is not None and (dispatch := self._experts.dispatch(chunk)).changes:
            code = store.dispatched(code, dispatch)
        return store.shared(code, asked, agreed, self._params_of[chunk.code]) if asked else code

    def _layouts(self, chunk: Chunk, agreed: Agreed) -> Sharded | RoutedLayouts | None:
        """Return the layouts of a chunk's inputs; None for a chunk that every device computes whole."""
        if self._routes(chunk):
            return self._captured.code.routed_layouts(self._code(chunk, agreed))
        if not self._asked_of(chunk):
            return None
        sharded = self._captured.code.layouts(self._code(chunk, agreed), TRACE_ROWS[0][0])
        if self._experts is not None and self._experts.computes(chunk):
            self._experts.check(chunk, sharded)
        return sharded

    def _chunk(self, chunk: Chunk) -> Chunk:
        code = chunk.code if chunk.opaque else self._code(chunk, self._ties.agreed(chunk))
        if code == chunk.code:
            return chunk
        body = self._bodies.get(code)
        if body is None:
            store, rows = self._captured.code, self._rows
            body = self._bodies[code] = (
                refitted(store, chunk, code)
                if rows is None
                else traced_at(store, chunk, code, rows)
            )
        inputs = tuple(replace(i, spec=body.ports[f"in{k}"]) for k, i in enumerate(chunk.inputs))
        outputs = tuple(replace(o, spec=body.ports[f"out{k}"]) for k, o in enumerate(chunk.outputs))
        axis = (
            self._experts.axis
            if self._experts is not None and self._experts.computes(chunk)
            else ""
        )
        if self._experts is not None and axis and not self._routes(chunk):
            self._experts.check_steps(chunk, body)
        if self._experts is not None and axis:
            self._experts.check_beside(chunk, body)
        shard = replace(
            chunk,
            inputs=inputs,
            outputs=outputs,
            ports=body.ports,
            steps=body.steps,
            code=code,
            experts=axis,
        )
        cut = any(one.cut for one in self._asked_of(chunk))
        return (
            replace(shard, terms=self._captured.code.layouts(code, TRACE_ROWS[0][0]).terms)
            if cut
            else shard
        )

    def _params(
        self, params: Sequence[Param], chunks: Sequence[Chunk], rows: Collection[str]
    ) -> tuple[Param, ...]:
        """Return the parameters with the spec of a device's shard, their layouts and the axes of their sums.

        Along the axes `rows` all gradients are summed, because rows differ.
        """
        layouts, summed = self._ties.layouts(), self._ties.summed()
        specs = {
            chunk_input.ref: chunk_input.spec
            for chunk in chunks
            for chunk_input in chunk.inputs
            if chunk_input.kind == "param"
        }
        return tuple(
            replace(
                p,
                spec=specs[p.name],
                layout=layouts[p.name],
                summed=_without(summed.get(p.name, ()), rows),
            )
            if p.name in specs
            else p
            for p in params
        )


def _without(axes: Sequence[str], some: Collection[str]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis not in some)
