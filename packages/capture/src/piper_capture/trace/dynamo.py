"""Capture model and loss once with Dynamo, as a single forward graph with a symbolic number of rows.

The model's parameters are fake CPU tensors: they have no bytes, and mix with tensors that are made without `device=`.
The graph is torch-level (linear, layer_norm, in-place methods as the user wrote them); `cut` splits it into chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from piper_capture.module.batch_norms import check_batch_norms
from piper_capture.module.forward_state import KeptState
from piper_capture.module.losses import cast_loss, take_constant
from piper_capture.module.metric_calls import MetricNode, OutputMetrics, metric_nodes
from piper_capture.module.model import (
    ASKED_ROWS,
    OWN_LOSS,
    BatchMaker,
    Example,
    Loss,
    check_batch,
    fake_model,
    named_tensors,
)
from piper_capture.module.tags import is_opaque
from piper_capture.steps.linearity import AuxiliaryForm
from piper_capture.torch_api import _torch
from piper_capture.torch_api._torch_rows import RowGuard, row_guards
from piper_capture.torch_api._torch_said import Statements
from piper_capture.torch_api.attributes import held_tensors
from piper_capture.trace.automatic import AutomaticRegions
from piper_capture.trace.dynamo_errors import unknown_tensor
from piper_capture.trace.exact_batch import exact_tensors, layers_cast_inputs
from piper_capture.trace.float8_layers import quantise_layers
from piper_capture.trace.tracing import EXAMPLE_ROWS, Recorder, StepCall, followed, step
from piper_capture.values.casts import Casts
from piper_capture.values.concrete import line_of
from piper_ir.ground.errors import CaptureError
from piper_ir.ground.expert_tokens import counts_tokens
from piper_ir.program.program import LossKind
from piper_ops import BatchNorm, UnsupportedVariant, replace_portable


@dataclass(frozen=True)
class InputOrigin:
    """Name the tensor of the user's that a placeholder of the graph stands for.

    The kind "kept" is a tensor that an earlier call left on the model, as an input of a later call's graph.
    """

    kind: Literal["param", "buffer", "batch", "kept"]
    name: str


@dataclass(frozen=True)
class TensorInfo:
    """Describe a parameter or buffer of the model. `tied` are other names of the same tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tied: tuple[str, ...] = ()
    requires_grad: bool = False
    persistent: bool = True


@dataclass(frozen=True)
class Forward:
    """Hold the captured graph, which still has `size` nodes (integers that depend on the rows).

    Attributes:
        owner: the module that the graph belongs to.
        origins: placeholder -> the tensor that it stands for.
        loss: node with the scalar.
        weight: node with the loss's weight, if the user's loss gives one.
        metrics: nodes with the job's metrics of outputs.
        rewrites: buffer -> node with the value assigned to it in forward.
        batch: tensors of the batch by name.
        fixed: names of batch tensors without rows.
        joined: names of batch tensors whose first two dimensions are flattened in the user's batch.
        sharing: pairs of names of batch tensors that share storage in the user's batch.
        constants: the batch's leaves that are not tensors, by name, as texts.
        norms: batch norms that use the statistics of the microbatch.
        model: the model with fake tensors.
        modules: id of a module, as in nn_module_stack, -> module.
        guards: guards on the number of rows under which the graph is valid.
        repeat: how to trace the next call, if forward changes Python state.
        notes: notes for the model's author about changes to the model.
        trace_at: traces the same call at another number of rows; None if forward changes Python state.
        counted: the totals over the whole batch that the loss reads.
        loss_kind: how the losses of microbatches become that of the whole batch; see
            `piper_ir.program.program.Program`.
        adding: the kind of auxiliary gradients that the form of the loss is for.
        sums: whether the loss is a sum over rows.
        of_model: nodes of the model, which may not combine rows; none if losses of microbatches are trained.
        quantised: whether linear layers multiply in float8, whose backward rounds gradients by their size.
        own_loss: whether the model computes its loss itself.
        warned: warnings about the model, which whoever uses the capture gives again; the check of rows adds to them.
        kept: name of a "kept" origin -> the node of the first call's graph that made the tensor, if one did.
    """

    graph: fx.Graph
    owner: fx.GraphModule
    origins: Mapping[fx.Node, InputOrigin]
    loss: fx.Node
    weight: fx.Node | None
    rewrites: Mapping[str, fx.Node]
    params: tuple[TensorInfo, ...]
    buffers: tuple[TensorInfo, ...]
    batch: Mapping[str, Tensor]
    model: nn.Module
    modules: Mapping[str, nn.Module]
    guards: tuple[RowGuard, ...]
    repeat: Repeat | None = None
    kept: Mapping[str, fx.Node | None] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    joined: frozenset[str] = frozenset()
    sharing: tuple[tuple[str, str], ...] = ()
    constants: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    norms: tuple[BatchNorm, ...] = ()
    metrics: tuple[MetricNode, ...] = ()
    trace_at: Callable[[int], Forward] | None = None
    loss_kind: LossKind = "mean"
    counted: Counted | None = None
    adding: AuxiliaryForm = ""
    sums: bool = False
    of_model: frozenset[str] = frozenset()
    quantised: bool = False
    own_loss: bool = False
    warned: list[str] = field(default_factory=list)

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """Return the nodes of the scalar results of a step: the loss, its weight, metrics."""
        return (
            self.loss,
            *([] if self.weight is None else [self.weight]),
            *[m.node for m in self.metrics],
        )

    def with_graph(self, **changed: Any) -> Forward:
        """Return the same capture with another graph, and with other fields that name its nodes."""
        return replace(self, **changed)


@dataclass(frozen=True)
class Counted:
    """Name the totals over the whole batch that a loss reads.

    Attributes:
        totals: the placeholder of the tensor of totals.
        reductions: the nodes that compute a microbatch's partial sums.
    """

    totals: fx.Node
    reductions: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Repeat:
    """Hold the state that calls change, and trace the next call from the state after the last one.

    Attributes:
        state: the Python state that calls change.
        trace: traces the next call.
    """

    state: KeptState
    trace: Callable[[], Forward]


@dataclass(frozen=True)
class ForwardOptions:
    """Say how a forward is traced.

    Attributes:
        casts: the dtypes of parameters and batch.
        most: as in `trace`, and likewise `shared`, `metrics` and `evaluating`.
        statistics: whether batch norms use statistics of each microbatch.
    """

    casts: Casts = field(default_factory=Casts)
    most: int = ASKED_ROWS
    shared: tuple[str, ...] = ()
    statistics: bool = False
    metrics: OutputMetrics = field(default_factory=dict)
    evaluating: bool = False


def capture_forward(
    model: nn.Module | Callable[[], nn.Module],
    batch: BatchMaker,
    loss: Loss,
    options: ForwardOptions | None = None,
) -> Forward:
    """Trace `loss(model(inputs), targets)` once; raise CaptureError, with the user's line, if it cannot be captured."""
    options = options or ForwardOptions()
    with _torch.capturing():
        first = _made(model, batch, loss, options)
        exact = _exact(first, options.casts)
        if not exact:
            return first
        try:
            casts = replace(options.casts, exact=exact)
            return _made(model, batch, loss, replace(options, casts=casts))
        except CaptureError as error:  # two dtypes where one is needed
            said = f"{', '.join(sorted(exact))} of the batch are rounded for computing: as they are, {error}"
            return replace(first, notes=(*first.notes, said))


def _exact(forward: Forward, casts: Casts) -> frozenset[str]:
    """Return the names of batch tensors that are not cast to a narrower compute dtype."""
    if casts.compute is None or not casts.narrow:
        return frozenset()
    params = [node for node, origin in forward.origins.items() if origin.kind == "param"]
    batch = {
        node: origin.name for node, origin in forward.origins.items() if origin.kind == "batch"
    }
    return exact_tensors(forward.graph, params, batch, casts.compute)


def _made(
    model: nn.Module | Callable[[], nn.Module],
    batch: BatchMaker,
    loss: Loss,
    options: ForwardOptions,
) -> Forward:
    """Return the graph of a forward with the casts of the options."""
    casts, metrics = options.casts, options.metrics
    module = fake_model(model, _torch.fake_cpu(), casts)
    if options.evaluating:
        module.eval()
    check_batch_norms(module, statistics=options.statistics)
    example = check_batch(batch, EXAMPLE_ROWS, casts, options.most, options.shared)
    loss = cast_loss(loss, casts)
    state = KeptState({"model": module, "loss": loss, "metrics": metrics}, step.__globals__)
    regions = AutomaticRegions(module)
    calls = _Calls(
        module,
        loss,
        example,
        state,
        regions,
        statistics=options.statistics,
        metrics=metrics,
        casts=casts,
    )
    first = calls.trace()
    if state.as_found():  # so the next call is like this one
        return replace(first, trace_at=calls.trace_at)
    return replace(first, repeat=Repeat(state, calls.trace_again))


@dataclass
class _Calls:
    """Trace several calls of the step on one model; each call starts from the model's state after the call before."""

    model: nn.Module
    loss: Loss
    example: Example
    state: KeptState
    regions: AutomaticRegions
    statements: Statements = field(default_factory=Statements)
    statistics: bool = False
    left: list[tuple[Tensor, fx.Node | None]] = field(default_factory=list)
    known: frozenset[str] = frozenset()
    metrics: OutputMetrics = field(default_factory=dict)
    casts: Casts = field(default_factory=Casts)

    def trace(self) -> Forward:
        batch, rows = self.example.tensors, self.example.rows
        origins = {id(t): InputOrigin("batch", name) for name, t in batch.items()}
        params, buffers, before = _manifest(self.model, origins)
        self.known = self.state.known = self.known or frozenset(
            origin.name for origin in origins.values()
        )
        kept = self._kept(origins, before.values())
        for tensor in rows.values():
            _torch.mark_rows(tensor)
        modules = {str(id(m)): m for m in self.model.modules()}
        with self.state.call(), layers_cast_inputs() if self.casts.exact else nullcontext():
            call = StepCall(self.model, self.loss, self.example, self.metrics)
            recorder, result = followed(call, self.regions, self.statements, modules)
        gm = recorder.graph_module()
        self.left += [(v, recorder.node_of(v)) for v in recorder.outputs if isinstance(v, Tensor)]
        try:
            norms = replace_portable(
                gm, lambda node: is_opaque(node, modules), statistics=self.statistics
            )
            narrow = quantise_layers(gm, self.model, modules, self.casts)
        except UnsupportedVariant as error:
            raise CaptureError(str(error)) from error
        result, metric_values = (result[:-1], result[-1]) if self.metrics else (result, {})
        nodes = [recorder.node_of(value) for value in result]
        _check_loss(result, nodes, own=self.loss is None)
        assert nodes[0] is not None
        placed = _placeholders(gm.graph, recorder.inputs, origins)
        names = {origin.name for node, origin in placed.items() if node.users}
        return Forward(
            graph=gm.graph,
            owner=gm,
            origins=placed,
            loss=nodes[0],
            weight=nodes[1] if len(nodes) == 2 else None,
            rewrites=_rewrites(
                self.model,
                {n: t for n, t in before.items() if n in self.known},
                recorder,
                {n for n, t in before.items() if origins[id(t)].name in names},
            ),
            params=params,
            buffers=buffers,
            batch=batch,
            model=self.model,
            modules=modules,
            guards=row_guards(gm.graph),
            kept=kept,
            fixed=self.example.fixed,
            joined=self.example.joined,
            sharing=self.example.sharing,
            constants=self.example.constants,
            notes=(*self.regions.texts, *recorder.notes, *self.statements.note, *narrow),
            norms=norms,
            metrics=metric_nodes(metric_values, recorder.node_of),
            quantised=bool(narrow),
            own_loss=self.loss is None,
            warned=[*recorder.kernel_choices, *self.regions.texts],
        )

    def trace_again(self) -> Forward:
        """Trace the next call; see `Repeat`."""
        self.left += [(tensor, None) for tensor in self.example.tensors.values()]
        self.example = self.example.map(lambda _, tensor: torch.zeros_like(tensor))
        return self.trace()

    def trace_at(self, rows: int) -> Forward:
        """Trace the call with this number of rows instead of `EXAMPLE_ROWS`."""
        named = self.example.rows
        example = self.example.map(
            lambda name, t: t.new_zeros((rows, *t.shape[1:])) if name in named else t
        )
        return replace(self, example=example, left=[]).trace()

    def _kept(
        self, origins: dict[int, InputOrigin], named: Collection[Tensor]
    ) -> dict[str, fx.Node | None]:
        """Add the tensors of earlier calls to `origins`; return their names with the nodes that made them."""
        names = {id(tensor): name for name, tensor in held_tensors(self.model)}
        kept: dict[str, fx.Node | None] = {}
        for tensor, node in [*self.left, *((tensor, None) for tensor in named)]:
            origin = origins.get(id(tensor))
            if origin is None or origin.name not in self.known:
                name = names.get(id(tensor), f"tensor {len(kept)} that an earlier call made")
                origins[id(tensor)] = InputOrigin("kept", name)
                kept.setdefault(name, node)
        return kept


def _manifest(
    model: nn.Module, origins: dict[int, InputOrigin]
) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...], dict[str, Tensor]]:
    """Return parameters and buffers with their tied names, and every buffer by name, and add them to `origins`."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, tuple[Tensor, bool]] = {}
    before: dict[str, Tensor] = {}
    for name, tensor, persistent in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
        tensors.setdefault(id(tensor), (tensor, persistent))
        if not isinstance(tensor, nn.Parameter):
            before[name] = tensor
    params: list[TensorInfo] = []
    buffers: list[TensorInfo] = []
    for key, (tensor, persistent) in tensors.items():
        first, *tied = names[key]
        is_param = isinstance(tensor, nn.Parameter)
        # not int(s): of a tensor that an earlier call left, that would be a guard on the number of rows
        shape = tuple(tensor.shape)
        info = TensorInfo(first, shape, tensor.dtype, tuple(tied), tensor.requires_grad, persistent)
        (params if is_param else buffers).append(info)
        origins[key] = InputOrigin("param" if is_param else "buffer", first)
    return tuple(params), tuple(buffers), before


def _check_loss(result: Sequence[Any], nodes: Sequence[fx.Node | None], own: bool) -> None:
    total = result[0]
    if (
        not isinstance(total, Tensor)
        or total.dim() != 0
        or not total.dtype.is_floating_point
        or nodes[0] is None
    ):
        what = (
            f"{total.dtype} of shape {_shape(total)}"
            if isinstance(total, Tensor)
            else type(total).__name__
        )
        if own:
            raise CaptureError(f"the model's own loss is {what}. {OWN_LOSS}")
        raise CaptureError(
            f"loss returned {what}; it must return a floating-point scalar, or a pair (sum, weight) of scalars"
        )
    if len(result) == 2 and (result[1].dim() != 0 or nodes[1] is None):
        raise CaptureError(
            f"loss returned a weight of shape {_shape(result[1])}; (sum, weight) must be scalars"
        )


def _shape(tensor: Tensor) -> str:
    return "[" + ", ".join("rows" if _torch.is_symbolic(s) else str(s) for s in tensor.shape) + "]"


def _rewrites(
    model: nn.Module, before: Mapping[str, Tensor], recorder: Recorder, read: Collection[str]
) -> dict[str, fx.Node]:
    """Return the buffers that forward replaced by another tensor (`self.count = self.count + 1`).

    One that no checkpoint has and that is not among those `read` (`self.aux_loss = ...`, for a caller to look at) is
    left out: nothing depends on it. Counts of experts' tokens are read by the rank.
    """
    node_by_buffer: dict[str, fx.Node] = {}
    for name, tensor, persistent in named_tensors(model):
        if name in before and tensor is not before[name]:
            if not (persistent or name in read or counts_tokens(name)):
                continue
            node = recorder.node_of(tensor)
            if node is None:
                raise CaptureError(
                    f"buffer {name!r} is replaced in forward by a tensor from elsewhere; assign one that forward "
                    f"computes"
                )
            old = before[name]
            if tensor.shape != old.shape or tensor.dtype != old.dtype:
                raise CaptureError(
                    f"{line_of(node)}: buffer {name!r}, {old.dtype} of shape {_shape(old)}, is replaced in forward "
                    f"by {tensor.dtype} of shape {_shape(tensor)}; a buffer keeps its shape and dtype"
                )
            node_by_buffer[name] = node
    return node_by_buffer


def _placeholders(
    graph: fx.Graph, inputs: Sequence[Any], origins: Mapping[int, InputOrigin]
) -> dict[fx.Node, InputOrigin]:
    origin_by_node: dict[fx.Node, InputOrigin] = {}
    for node, value in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        if not isinstance(value, Tensor):
            continue
        origin = origins.get(id(value))
        if origin is None and not node.users:  # the blocks of a block mask
            node.graph.erase_node(node)
            continue
        if origin is None and take_constant(graph, node, value):
            continue
        if origin is None:
            raise unknown_tensor(line_of(next(iter(node.users), node)), str(node.target), value)
        origin_by_node[node] = origin
    return origin_by_node
