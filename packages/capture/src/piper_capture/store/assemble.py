"""Capture a training step: model, batch and loss become a Program and a CodeStore."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import torch
from torch import fx, nn

from piper_capture.chunks.advancing import advancing_buffers
from piper_capture.chunks.cut import Cut, Piece, PieceInput, cut
from piper_capture.chunks.draw_places import Places
from piper_capture.chunks.other_rows import check_rows, holding_at_other_rows
from piper_capture.chunks.regions import has_experts
from piper_capture.chunks.remarks import remarks
from piper_capture.chunks.rowpairs import compares_rows
from piper_capture.chunks.stateful_forward import check_steady
from piper_capture.module.metric_calls import OutputMetrics
from piper_capture.module.model import ASKED_ROWS, BatchMaker, Loss
from piper_capture.module.shared import check_batch, check_shared
from piper_capture.steps.draws import draws_of
from piper_capture.steps.joint import TracedChunk
from piper_capture.steps.linearity import Auxiliary, AuxiliaryForm
from piper_capture.store.auxiliary import auxiliary
from piper_capture.store.captured import Captured
from piper_capture.store.codestore import CodeStore, TraceSpec
from piper_capture.store.sizes import Fitter, NotAffine, explain
from piper_capture.store.traced import Traced, outline_of
from piper_capture.torch_api import _torch
from piper_capture.trace.dynamo import Forward, ForwardOptions, capture_forward
from piper_capture.trace.own_backwards import has_own_backward
from piper_capture.trace.tracing import NONE
from piper_capture.values.casts import Casts
from piper_capture.values.concrete import concrete_shape, line_of
from piper_capture.whole_batch.averages import averages, mark_averages
from piper_capture.whole_batch.batch_loss import (
    over_microbatches,
    over_whole_batch,
    with_metrics_of_batch,
)
from piper_capture.whole_batch.counting import CounterSpec
from piper_capture.whole_batch.row_mixing import (
    TRIAL_ROWS,
    check_opaque_rows,
    check_rows_apart,
)
from piper_capture.whole_batch.selections import with_static_selections
from piper_ir.ground.errors import CaptureError
from piper_ir.ground.sizes import Dim, TensorSpec, affine, fit
from piper_ir.program.program import BatchTensor, Buffer, Chunk, Input, Output, Param, Program
from piper_ops import Float8, dtype_name


class TraceOptions(TypedDict, total=False):
    """Name the arguments of `trace` that may be left out."""

    dtype: torch.dtype | None
    reduce: torch.dtype | None
    keep: Mapping[str, torch.dtype] | None
    wide: torch.dtype
    float8: Float8 | None
    most: int
    shared: tuple[str, ...]
    statistics: bool
    metrics: OutputMetrics
    evaluating: bool
    whole_batch: bool
    scaled: bool
    adding: AuxiliaryForm


TRACE_ROWS = ((2, 3, 5), (11, 13, 17))
"""The numbers of rows of the joint traces: two determine the sizes, the third checks them.

The second set is for chunks with sizes that coincide at small numbers of rows, though they differ in general: that
would simplify or order their operations otherwise.
"""


def trace(
    model: nn.Module | Callable[[], nn.Module],
    batch: BatchMaker,
    loss: Loss = None,
    *,
    dtype: torch.dtype | None = None,
    reduce: torch.dtype | None = None,
    keep: Mapping[str, torch.dtype] | None = None,
    wide: torch.dtype = torch.float32,
    float8: Float8 | None = None,
    most: int = ASKED_ROWS,
    shared: tuple[str, ...] = (),
    statistics: bool = False,
    metrics: OutputMetrics = NONE,
    evaluating: bool = False,
    whole_batch: bool = True,
    scaled: bool = False,
    adding: AuxiliaryForm = "",
) -> Traced:
    """Trace the training step `loss(model(inputs), targets)` as chunks with exact sizes.

    `Chunk.random` says that F draws random numbers, and `Chunk.draws` names the operations; the code calls each of them
    as `piper_ops.draw`. Dropout is traced as aten.native_dropout, which saves a mask of bools.

    Args:
        model: a module (left untouched), or a callable that makes one; it runs on fake tensors, for real only if its
            constructor reads values of tensors.
        batch: rows -> (inputs, targets), or a mapping of inputs. inputs is a tensor, a tuple (positional) or a mapping
            (keyword), targets any nest of tensors; dimension 0 of every tensor is the rows, but for `shared` ones.
        loss: a scalar, (sum, weight), or a list or dict of such pairs; None for the model's own.
        dtype: floating-point parameters, and batch tensors that products read, are cast to it. Buffers stay as the
            model made them, but for float64, which is there to compare: all is in float64 then.
        reduce: the dtype of the gradient accumulators to which W adds; None for the dtype of the parameters.
        keep: patterns of parameter names -> the dtype of these parameters instead of `dtype`.
        wide: the dtype of other floating-point tensors of the batch, such as targets, unless `dtype` is wider.
        float8: the linear layers that multiply in float8; None for none.
        most: rows that `batch` has; it is asked for two of them at most.
        shared: patterns of the names of batch tensors without rows, beside the tensors marked by `piper.shared`.
        statistics: whether batch norms take the statistics of each microbatch; otherwise they are refused.
        metrics: functions of (output, targets) whose values are scalars beside the loss.
        evaluating: whether the model is in eval mode, as it is when it is evaluated.
        whole_batch: whether the loss is the loss of the whole batch; else it is the mean over microbatches.
        scaled: whether the backward starts from a scale of the loss, which then multiplies a mean, not a sum that is
            divided in the end.
        adding: the kind of the auxiliary gradients that the model adds, beside which the loss needs another form. A
            model that has some is traced again so.

    Raises:
        CaptureError: with the user's line if there is one, for graph breaks, dependence on the number of rows,
            in-place changes that cannot be made functional, batch statistics, autocast for one device, unregistered
            kernels, and chunks whose sizes are not affine in the rows.
    """
    with _torch.capturing():
        casts = Casts(dtype, reduce, keep or {}, wide=wide, float8=float8)
        options = ForwardOptions(casts, most, shared, statistics, metrics, evaluating)
        forward = capture_forward(model, batch, loss, options)
        check_steady(forward)
        forward = holding_at_other_rows(forward, most)
        if statistics:
            mark_averages(forward)
        forward = with_static_selections(forward)
        forward = (
            over_whole_batch(forward, adding, scaled=scaled)
            if whole_batch
            else over_microbatches(forward, adding, scaled=scaled)
        )
        forward = with_metrics_of_batch(forward)
        for rows in TRACE_ROWS[0]:
            check_rows(forward, rows)
        pieces = cut(forward)
        changed = {r.name for piece in pieces.pieces for r in piece.results if r.kind == "buffer"}
        check_batch(forward.sharing, _changed_in_batch(pieces))
        check_shared(forward.model, {p.name for p in forward.params if p.requires_grad}, changed)
        traced = Traced(
            forward,
            pieces.layers,
            outline_of(pieces),
            reduce,
            _Assembly(forward, pieces, reduce).captured,
            has_experts(forward),
        )
        if not evaluating and (other := _other_form(forward, traced)):
            how: TraceOptions = {
                "dtype": dtype,
                "reduce": reduce,
                "keep": keep,
                "wide": wide,
                "float8": float8,
                "whole_batch": whole_batch,
                "scaled": scaled,
            }
            how |= {
                "most": most,
                "shared": shared,
                "statistics": statistics,
                "metrics": metrics,
                "adding": other,
            }
            return trace(model, batch, loss, **how)
        return traced


def capture(
    model: nn.Module | Callable[[], nn.Module],
    batch: BatchMaker,
    loss: Loss = None,
    **how: Unpack[TraceOptions],
) -> Captured:
    """Trace a training step and return its capture with the usual layers; see `trace`, which has the same arguments."""
    return trace(model, batch, loss, **how).assembled


def with_experts(captured: Captured) -> Captured:
    """Return the capture of the same model, cut at the regions with the coordinate experts, too."""
    asked = captured.program.layers
    with _torch.capturing():
        pieces = cut(captured.forward, asked, experts=True)
        return assembled(captured.forward, pieces, captured.reduce, asked, captured.code)


def assembled(
    forward: Forward,
    pieces: Cut,
    reduce: torch.dtype | None,
    asked: tuple[str, ...],
    store: CodeStore,
) -> Captured:
    """Return another capture of a captured graph, cut otherwise, with its code in `store`; `asked` names its layers.

    Whether rows are combined has been looked at: between the tokens that a mixture has sorted, parts could not tell.
    """
    return _Assembly(forward, pieces, reduce, asked, store).captured(new=False)


def with_layers(traced: Traced | Captured, asked: tuple[str, ...]) -> Captured:
    """Return the capture of a traced model with these layers; the model is not traced again.

    Args:
        traced: the traced model, or its capture with the usual layers.
        asked: patterns of the names of modules, LONGEST_CHAIN, or nothing for the usual layers.

    Raises SelectorError for a pattern that matches nothing.
    """
    if not asked:
        return traced.assembled
    asked_capture = traced.layered.get(asked)
    if asked_capture is None:
        with _torch.capturing():
            pieces = cut(traced.forward, asked)
            same = pieces.layers == traced.layers
            asked_capture = (
                traced.assembled
                if same
                else _Assembly(traced.forward, pieces, traced.reduce, asked).captured()
            )
        traced.layered[asked] = asked_capture
    return asked_capture


def _other_form(forward: Forward, traced: Traced) -> AuxiliaryForm:
    """Return the kind of the gradients that users' backwards add, if the loss needs another form beside them.

    Means need gradients that start from 1 and are divided by the number of microbatches; sums need such that are not
    divided.
    """
    if forward.adding or not has_own_backward(forward.graph.nodes):
        return ""
    kinds = {one.kind for one in traced.assembled.auxiliary}
    return (
        "mean"
        if kinds == {"mean"}
        else "sum"
        if kinds == {"sum"} and forward.loss_kind == "sum"
        else ""
    )


def _changed_in_batch(pieces: Cut) -> dict[str, str]:
    """Return the tensors of the batch that forward or loss change in place, each with the line that does."""
    facts, origins = pieces.facts, pieces.forward.origins
    batch = {
        origin.name: facts.storages[node]
        for node, origin in origins.items()
        if origin.kind == "batch"
    }
    writers = [node for node in pieces.ops.nodes if facts.writes.get(node)]
    return {
        name: line_of(node)
        for name, own_storages in batch.items()
        for node in writers
        if facts.writes[node] & own_storages
    }


class _Assembly:
    """Trace the pieces in reverse order, because consumers decide which outputs have gradients."""

    def __init__(
        self,
        forward: Forward,
        pieces: Cut,
        reduce: torch.dtype | None,
        asked: tuple[str, ...] = (),
        store: CodeStore | None = None,
    ) -> None:
        self._forward, self._cut, self._reduce, self._asked = forward, pieces, reduce, asked
        self._store = CodeStore() if store is None else store
        self._requires = {p.name for p in forward.params if p.requires_grad}
        self._shapes: dict[fx.Node, TensorSpec] = {}
        self._fitted: dict[str, Chunk] = {}
        self._wanted: set[tuple[int, fx.Node]] = set()
        self._pieces = {p.region.number: p for p in pieces.pieces}
        self._places = Places(forward, pieces.facts)
        self._made_of: dict[str, Piece] = {}

    def captured(self, *, new: bool = True) -> Captured:
        """Return the capture; a `new` one may be refused, as models that combine rows are."""
        with _torch.capturing():
            return self._captured(new)

    def _captured(self, new: bool) -> Captured:
        chunks = [self._chunk(piece) for piece in reversed(self._cut.pieces)][::-1]
        if not any(o.kind == "loss" and o.needs_grad for c in chunks for o in c.outputs):
            raise CaptureError(
                "the loss does not depend on any parameter with requires_grad=True; there is nothing to train"
            )
        if new:
            self._check_rows_apart()
        said = advancing_buffers(self._cut), remarks(self._cut)
        more: dict[str, Any] = {
            "layers": self._cut.layers,
            "reduce": self._reduce,
            "auxiliary": self._auxiliary(chunks),
        }
        return Captured(self._program(chunks), self._store, self._forward, *said, **more)

    def _check_rows_apart(self) -> None:
        """Raise CaptureError for an operation of the model that combines rows of the batch; note a warning.

        Statistics that go into buffers are left to the judge, which compares with the whole batch.
        """
        if not self._forward.of_model:
            return
        model = self._forward.of_model - {n.name for n in averages(self._forward)}
        for code, piece in self._made_of.items():
            recipe = self._store.recipe(code)
            if piece.opaque:
                modules = [self._cut.module(piece, rows) for rows in TRIAL_ROWS]
                random = self._cut.random(piece)
                believed = check_opaque_rows(modules, recipe.specs, piece, random=random)
            else:
                joints = [self._store.joint(code, rows) for rows in TRIAL_ROWS]
                believed = check_rows_apart(joints, recipe.specs, self._forward.graph, model)
            self._forward.warned.extend(believed)

    def _auxiliary(self, chunks: Sequence[Chunk]) -> tuple[Auxiliary, ...]:
        """Return the backwards that are not linear; see `auxiliary`."""
        forward = self._forward
        backwards = [
            auxiliary(self._store, code, forward.sums)
            for code in dict.fromkeys(chunk.code for chunk in chunks)
        ]
        right = "mean" if forward.adding == "mean" else "sum" if forward.loss_kind != "sum" else ""
        return tuple(
            replace(one, trained=one.kind == right) for one in backwards if one is not None
        )

    def _program(self, chunks: Sequence[Chunk]) -> Program:
        trained = {i.ref for c in chunks for i in c.inputs if i.kind == "param" and i.needs_grad}
        return Program(
            chunks=tuple(chunks),
            params=tuple(
                Param(p.name, TensorSpec(p.shape, dtype_name(p.dtype)), p.tied, p.name in trained)
                for p in self._forward.params
            ),
            buffers=tuple(
                Buffer(b.name, TensorSpec(b.shape, dtype_name(b.dtype)), b.persistent)
                for b in self._forward.buffers
            ),
            batch=tuple(self._batch_tensor(name, t) for name, t in self._forward.batch.items()),
            constants=self._forward.constants,
            loss_kind=self._forward.loss_kind,
            layers=self._asked,
            chained=self._cut.layers.chained,
        )

    def _batch_tensor(self, name: str, tensor: torch.Tensor) -> BatchTensor:
        spec, counted = (
            TensorSpec(self._batch_shape(name, tuple(tensor.shape)), dtype_name(tensor.dtype)),
            self._forward.counted,
        )
        if counted is None or self._forward.origins[counted.totals].name != name:
            return BatchTensor(name, spec)
        counter = CounterSpec(self._forward)
        self._store.add_counter(counter)
        return BatchTensor(name, spec, counter.code, counter.reads)

    def _batch_shape(self, name: str, shape: tuple[int, ...]) -> tuple[Dim, ...]:
        return shape if name in self._forward.fixed else (affine(0, 1), *shape[1:])

    def _chunk(self, piece: Piece) -> Chunk:
        number = piece.region.number
        specs = tuple(self._spec(slot.node) for slot in piece.slots)
        needs_grad = tuple(self._requires_grad(slot) for slot in piece.slots)
        mask = tuple(
            r.kind == "loss" or (r.kind == "value" and (number, r.node) in self._wanted)
            for r in piece.results
            if not r.changed
        )
        code = self._code(piece, specs, needs_grad, mask)
        self._store.add(
            code, TraceSpec(self._cut, piece, specs, needs_grad, mask, reduce=self._reduce)
        )
        body = self._fitted.get(code)
        if body is None:
            body = self._fitted[code] = self._fit(code, piece, specs)
            self._made_of[code] = piece
            self._store.expect(code, body)
        inputs = tuple(
            Input(slot.kind, self._reference(slot), spec, wanted.needs_grad)
            for slot, spec, wanted in zip(piece.slots, specs, body.inputs, strict=True)
        )
        self._wanted |= {
            (s.source, s.node)
            for s, i in zip(piece.slots, inputs, strict=True)
            if s.kind == "value" and i.needs_grad
        }
        outputs = tuple(
            Output(r.kind, o.spec, r.name, o.needs_grad, r.varies)
            for r, o in zip(piece.results, body.outputs, strict=True)
        )
        shared = body.ports, body.steps, code, body.random, piece.opaque
        alike = self._cut.body(self._made_of[code])
        draws = self._places.of(body.draws, alike, self._cut.body(piece)) if body.draws else ()
        return Chunk(piece.region.id, piece.region.coords, inputs, outputs, *shared, draws=draws)

    def _fit(self, code: str, piece: Piece, specs: Sequence[TensorSpec]) -> Chunk:
        """Return a chunk with everything that all chunks with this code share."""
        problem: CaptureError | None = None
        for rows in TRACE_ROWS:
            traces = {r: self._store.trace(code, r) for r in rows}
            fitter = Fitter(rows, (traces[rows[0]], traces[rows[1]], traces[rows[2]]))
            try:
                return replace(
                    self._shared(piece, specs, traces[rows[0]], fitter),
                    draws=draws_of(rows, [t.draws for t in traces.values()]),
                )
            except NotAffine as error:
                problem = problem or explain(error, piece.region.id, traces)
        assert problem is not None
        raise compares_rows(piece.region.nodes) or problem

    def _shared(
        self, piece: Piece, specs: Sequence[TensorSpec], trace: TracedChunk, fitter: Fitter
    ) -> Chunk:
        ports = fitter.ports()
        inputs = tuple(
            Input(s.kind, "", spec, g)
            for s, spec, g in zip(piece.slots, specs, trace.input_grads, strict=True)
        )
        outputs = tuple(
            Output(r.kind, ports[f"out{k}"], "", g)
            for k, (r, g) in enumerate(zip(piece.results, trace.output_grads, strict=True))
        )
        return Chunk("", {}, inputs, outputs, ports, fitter.steps(), "", trace.random)

    def _reference(self, slot: PieceInput) -> str:
        if slot.kind != "value":
            return slot.name
        producer = self._pieces[slot.source]
        index = next(
            k
            for k, r in enumerate(producer.results)
            if r.node is slot.node and (r.changed or r.kind == "value")
        )
        return f"{producer.region.id}:out{index}"

    def _requires_grad(self, slot: PieceInput) -> bool:
        """Return whether the tensor requires grad after its producer has run."""
        if slot.kind == "param":
            return slot.name in self._requires
        if slot.kind != "value":
            return False
        known = self._cut.facts.requires_grad.get(slot.node, {})
        after = [known[n] for n in self._pieces[slot.source].region.nodes if n in known]
        return after[-1] if after else False

    def _spec(self, node: fx.Node) -> TensorSpec:
        spec = self._shapes.get(node)
        if spec is None:
            tensor = node.meta["example_value"]
            at2, at3, at5 = (concrete_shape(tensor, rows, node) for rows in (2, 3, 5))
            shape = tuple(fit(a, b) for a, b in zip(at2, at3, strict=True))
            spec = self._shapes[node] = TensorSpec(shape, dtype_name(tensor.dtype))
            if spec.bind(5).shape != at5:
                raise explain(NotAffine(f"shapes {at2}, {at3}, {at5}"), str(node), {})
        return spec

    def _code(
        self,
        piece: Piece,
        specs: Sequence[TensorSpec],
        needs_grad: Sequence[bool],
        mask: Sequence[bool],
    ) -> str:
        slots = [
            f"{s.kind} {spec} {grad}"
            for s, spec, grad in zip(piece.slots, specs, needs_grad, strict=True)
        ]
        sums = [f"sums {self._reduce}"] if self._reduce is not None else []
        text = "\n".join([self._cut.text(piece), *slots, str(list(mask)), *sums])
        return hashlib.sha256(text.encode()).hexdigest()[:16]
