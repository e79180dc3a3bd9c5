"""Capture model and loss once with Dynamo, as a single forward graph whose number of rows is a symbol.

The model's parameters are fake CPU tensors: they have no bytes, and mix with tensors that are made without `device=`.
The graph is torch-level (linear, layer_norm, in-place methods as the user wrote them); `cut` splits it into chunks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from piper_compiler.capture import _torch
from piper_compiler.capture._torch_blocks import attention_modules_traced
from piper_compiler.capture.attributes import held_tensors
from piper_compiler.capture.casts import Casts
from piper_compiler.capture.concrete import line_of
from piper_compiler.capture.contexts import drop_kernel_choices
from piper_compiler.capture.dynamo_errors import as_capture_error
from piper_compiler.capture.kept import KeptState
from piper_compiler.capture.model import (
    ASKED_ROWS,
    OWN_LOSS,
    BatchMaker,
    Example,
    Loss,
    check_batch,
    fake_model,
    join_rows,
    named_tensors,
    own_loss,
)
from piper_compiler.capture.repeated import NotFlat, as_regions, complete, flatten, repeated_layers
from piper_compiler.capture.tags import is_opaque
from piper_ir.errors import CaptureError
from piper_ops import UnsupportedVariant, replace_portable

EXAMPLE_ROWS = 6
"""The number of rows of the symbolic capture. A model that compares its rows with any fixed number is refused."""


@dataclass(frozen=True)
class InputOrigin:
    """Say what a placeholder of the graph stands for, under the user's name.

    The kind "kept" is a tensor that an earlier call left on the model, in the graph of a later call.
    """

    kind: Literal["param", "buffer", "batch", "kept"]
    name: str


@dataclass(frozen=True)
class TensorInfo:
    """Describe a parameter or buffer of the model. `tied` has other names of the same tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tied: tuple[str, ...] = ()
    requires_grad: bool = False
    persistent: bool = True


@dataclass(frozen=True)
class Forward:
    """Hold the captured graph, in which `size` nodes (integers that depend on the rows) still stand.

    Attributes:
        owner: the module that the graph belongs to.
        origins: placeholder -> meaning.
        loss: node with the scalar.
        weight: node with the loss's weight, if the user's loss gives one.
        rewrites: buffer -> node with the value assigned to it in forward.
        batch: tensors of the batch by name.
        fixed: names of those without rows.
        joined: names of those whose first two dimensions are one in the user's batch.
        constants: what else the batch holds, by name, as texts.
        model: the model with fake tensors.
        modules: id of a module, as in nn_module_stack, -> module.
        guards: facts about sizes that the path depends on.
        repeat: how to trace the next call, where forward changes something that was there before.
        kept: name of an origin of this kind -> the node of the first call's graph that made the tensor, if one did.
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
    guards: tuple[_torch.RowGuard, ...]
    repeat: Repeat | None = None
    kept: Mapping[str, fx.Node | None] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    joined: frozenset[str] = frozenset()
    constants: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Repeat:
    """Say what calls change, and how to trace the next call on what the one before left.

    Attributes:
        state: what calls change beside tensors.
        trace: traces the next call.
    """

    state: KeptState
    trace: Callable[[], Forward]


def step(model: nn.Module, loss: Loss, inputs: Any, targets: Any, joined: frozenset[str] = frozenset()) -> tuple[Tensor, ...]:
    """Return the captured results: the loss of a batch, and its weight if the user's loss gives one.

    Both are float32 at least: three digits of bfloat16 are too few for a loss, and for a sum of weights.
    """
    if joined:
        inputs, targets = join_rows(inputs, "inputs", joined), join_rows(targets, "targets", joined)
    if isinstance(inputs, dict):
        output = model(**inputs)
    elif isinstance(inputs, tuple):
        output = model(*inputs)
    else:
        output = model(inputs)
    result = own_loss(output) if loss is None else loss(output, targets)
    total, *rest = result if isinstance(result, tuple) else (result,)
    if isinstance(total, Tensor) and total.dtype in (torch.bfloat16, torch.float16):
        total = total.float()
    if not isinstance(result, tuple):
        return (total,)
    (weight,) = rest
    if isinstance(weight, Tensor):
        return total, weight.detach().to(total.dtype)
    return total, torch.full((), weight, dtype=total.dtype)


@dataclass
class _Recorder:
    """Keep the graph that torch.compile hands over, and answer with its fake outputs."""

    batch: Collection[int]
    module: fx.GraphModule | None = None
    inputs: Sequence[Any] = ()
    outputs: list[Any] = field(default_factory=list)
    problem: CaptureError | None = None

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.module, self.inputs = module, inputs
        self.problem = _specialised(module, inputs, self.batch)
        if self.problem:
            raise self.problem
        nodes = module.graph.output_node().args[0]
        assert isinstance(nodes, list | tuple)
        self.outputs = [n.meta["example_value"] if isinstance(n, fx.Node) else n for n in nodes]
        return lambda *_: self.outputs

    def clean(self) -> None:
        """Replace the calls of regions in the graph, and drop choices of kernels, once Dynamo is done with it."""
        if self.module is not None:
            self.inputs = complete(self.module, self.inputs)
            flatten(self.module)
            drop_kernel_choices(self.module)

    def node_of(self, value: Any) -> fx.Node | None:
        """Return the node whose fake value is this very object."""
        assert self.module is not None
        nodes = self.module.graph.output_node().args[0]
        assert isinstance(nodes, list | tuple)
        return next((n for n, v in zip(nodes, self.outputs, strict=True) if v is value and isinstance(n, fx.Node)), None)


def capture_forward(
    model: nn.Module | Callable[[], nn.Module],
    batch: BatchMaker,
    loss: Loss,
    casts: Casts | None = None,
    most: int = ASKED_ROWS,
    shared: tuple[str, ...] = (),
) -> Forward:
    """Trace `loss(model(inputs), targets)` once; raise CaptureError, with the user's line, if it cannot be captured."""
    casts = casts or Casts()
    with _torch.CAPTURING:
        module = fake_model(model, _torch.fake_cpu(), casts)
        example = check_batch(batch, EXAMPLE_ROWS, casts, most, shared)
        state = KeptState({"model": module, "loss": loss}, step.__globals__)
        calls = _Calls(module, loss, example, state)
        first = calls.trace()
        return replace(first, repeat=Repeat(state, calls.trace_again)) if state.changes else first


@dataclass
class _Calls:
    """Call the step on one model several times; each call starts from what the call before left on the model."""

    model: nn.Module
    loss: Loss
    example: Example
    state: KeptState
    left: list[tuple[Tensor, fx.Node | None]] = field(default_factory=list)
    known: frozenset[str] = frozenset()

    def trace(self) -> Forward:
        batch, rows = self.example.tensors, self.example.rows
        origins = {id(t): InputOrigin("batch", name) for name, t in batch.items()}
        params, buffers, before = _manifest(self.model, origins)
        self.known = self.state.known = self.known or frozenset(origin.name for origin in origins.values())
        kept = self._kept(origins, before.values())
        for tensor in rows.values():
            _torch.mark_rows(tensor)
        modules = {str(id(m)): m for m in self.model.modules()}
        recorder = _Recorder({id(t) for t in rows.values()})
        with self.state.call():
            result = _run(recorder, self.model, self.loss, self.example)
        gm = recorder.module
        if gm is None:
            raise CaptureError("the loss does not depend on any tensor operation; compute it from the output of the model")
        self.left += [(v, recorder.node_of(v)) for v in recorder.outputs if isinstance(v, Tensor)]
        try:
            replace_portable(gm, lambda node: is_opaque(node, modules))
        except UnsupportedVariant as error:
            raise CaptureError(str(error)) from error
        nodes = [recorder.node_of(value) for value in result]
        _check_loss(result, nodes, own=self.loss is None)
        placeholders = gm.graph.find_nodes(op="placeholder")
        assert nodes[0] is not None
        return Forward(
            graph=gm.graph,
            owner=gm,
            origins=_placeholders(placeholders, recorder.inputs, origins),
            loss=nodes[0],
            weight=nodes[1] if len(nodes) == 2 else None,
            rewrites=_rewrites(self.model, {n: t for n, t in before.items() if n in self.known}, recorder),
            params=params,
            buffers=buffers,
            batch=batch,
            model=self.model,
            modules=modules,
            guards=_torch.row_guards(gm.graph),
            kept=kept,
            fixed=self.example.fixed,
            joined=self.example.joined,
            constants=self.example.constants,
        )

    def trace_again(self) -> Forward:
        """Trace the next call; see `Repeat`."""
        self.left += [(tensor, None) for tensor in self.example.tensors.values()]
        self.example = self.example.map(lambda _, tensor: torch.zeros_like(tensor))
        return self.trace()

    def _kept(self, origins: dict[int, InputOrigin], named: Collection[Tensor]) -> dict[str, fx.Node | None]:
        """Mark in `origins` the tensors that earlier calls left; return their names with the nodes that made them."""
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
        shape = tuple(int(s) for s in tensor.shape)
        info = TensorInfo(first, shape, tensor.dtype, tuple(tied), tensor.requires_grad, persistent)
        (params if is_param else buffers).append(info)
        origins[key] = InputOrigin("param" if is_param else "buffer", first)
    return tuple(params), tuple(buffers), before


def _run(recorder: _Recorder, model: nn.Module, loss: Loss, example: Example) -> tuple[Any, ...]:
    with _torch.own_settings(), attention_modules_traced(), torch.enable_grad():
        if repeated := repeated_layers(model):
            try:
                with as_regions(model, repeated):
                    return _traced(recorder, model, loss, example)
            except Exception:  # the plain trace gives a graph, or says what is wrong in the user's terms
                recorder.problem = None
        try:
            with _torch.regions_apart():
                return _traced(recorder, model, loss, example)
        except _torch.CAPTURE_ERRORS as error:
            raise recorder.problem or as_capture_error(error, __file__, example.tensors) from error
        except NotFlat as error:
            raise CaptureError(
                f"a nested compile region of the model's cannot be captured: {error}; remove torch.compiler.nested_compile_region"
                ", or use it only around code that calls no other region"
            ) from error


def _traced(recorder: _Recorder, model: nn.Module, loss: Loss, example: Example) -> tuple[Any, ...]:
    result = _torch.compile_once(step, recorder)(model, loss, example.inputs, example.targets, example.joined)
    recorder.clean()
    assert isinstance(result, tuple)
    return result


def _specialised(module: fx.GraphModule, inputs: Sequence[Any], batch: Collection[int]) -> CaptureError | None:
    """Return the error for a model that fixed the number of rows while it was traced."""
    nodes = module.graph.find_nodes(op="placeholder")
    rows = [n.meta["example_value"].shape[0] for n, v in zip(nodes, inputs, strict=True) if id(v) in batch]
    if all(_torch.is_symbolic(r) for r in rows):
        return None
    lines = [g.line for g in _torch.row_guards(module.graph) if g.line and re.search(rf"Eq\(.*\b{EXAMPLE_ROWS}\b", str(g.expr))]
    return CaptureError(
        f"{lines[0] if lines else 'the model'}: the number of rows of the batch is compared or combined with a constant; remove "
        f"the constant, because Piper chooses the rows of each microbatch (capture used {EXAMPLE_ROWS})"
    )


def _check_loss(result: Sequence[Any], nodes: Sequence[fx.Node | None], own: bool) -> None:
    total = result[0]
    if not isinstance(total, Tensor) or total.dim() != 0 or not total.dtype.is_floating_point or nodes[0] is None:
        what = f"{total.dtype} of shape {_shape(total)}" if isinstance(total, Tensor) else type(total).__name__
        if own:
            raise CaptureError(f"the model's own loss is {what}. {OWN_LOSS}")
        raise CaptureError(f"loss returned {what}; it must return a floating-point scalar, or a pair (sum, weight) of scalars")
    if len(result) == 2 and (result[1].dim() != 0 or nodes[1] is None):
        raise CaptureError(f"loss returned a weight of shape {_shape(result[1])}; (sum, weight) must be scalars")


def _shape(tensor: Tensor) -> str:
    return "[" + ", ".join("rows" if _torch.is_symbolic(s) else str(s) for s in tensor.shape) + "]"


def _rewrites(model: nn.Module, before: Mapping[str, Tensor], recorder: _Recorder) -> dict[str, fx.Node]:
    """Return the buffers that forward replaced by another tensor (`self.count = self.count + 1`)."""
    found: dict[str, fx.Node] = {}
    for name, tensor, _ in named_tensors(model):
        if name in before and tensor is not before[name]:
            node = recorder.node_of(tensor)
            if node is None:
                raise CaptureError(
                    f"buffer {name!r} is replaced in forward by a tensor from elsewhere; assign one that forward computes"
                )
            old = before[name]
            if tensor.shape != old.shape or tensor.dtype != old.dtype:
                raise CaptureError(
                    f"{line_of(node)}: buffer {name!r}, {old.dtype} of shape {_shape(old)}, is replaced in forward by "
                    f"{tensor.dtype} of shape {_shape(tensor)}; a buffer keeps its shape and dtype"
                )
            found[name] = node
    return found


def _placeholders(
    nodes: Sequence[fx.Node], inputs: Sequence[Any], origins: Mapping[int, InputOrigin]
) -> dict[fx.Node, InputOrigin]:
    found: dict[fx.Node, InputOrigin] = {}
    for node, value in zip(nodes, inputs, strict=True):
        if not isinstance(value, Tensor):
            continue
        origin = origins.get(id(value))
        if origin is None and not node.users:  # the blocks of a block mask
            node.graph.erase_node(node)
            continue
        if origin is None:
            raise CaptureError(
                f"the model uses a tensor of shape {tuple(value.shape)} ({node.target}) that is neither a parameter, a buffer "
                "nor part of the batch; register it with register_buffer"
            )
        found[node] = origin
    return found
