"""Let Dynamo trace a step, again each time after a part of the model became opaque automatically (`automatic`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from piper_capture.module.losses import losses_traced
from piper_capture.module.metric_calls import OutputMetrics, measured
from piper_capture.module.model import Example, Loss, join_rows, own_loss
from piper_capture.module.tags import is_opaque
from piper_capture.torch_api import _torch
from piper_capture.torch_api._torch_blocks import attention_modules_traced
from piper_capture.torch_api._torch_failing import failing_module
from piper_capture.torch_api._torch_gradients import requires_grad_traced
from piper_capture.torch_api._torch_locks import LockedCalls
from piper_capture.torch_api._torch_rows import row_guards
from piper_capture.torch_api._torch_said import Statements
from piper_capture.trace.autocast import write_casts
from piper_capture.trace.automatic import AutomaticRegions, Untraceable, causes, module_of
from piper_capture.trace.checkpoints import checkpoint_note, open_checkpoints
from piper_capture.trace.contexts import drop_kernel_choices
from piper_capture.trace.dynamo_errors import as_capture_error, cause_of, follows_values
from piper_capture.trace.repeated import (
    NotFlat,
    as_regions,
    complete,
    flatten,
    repeated_layers,
)
from piper_capture.values.concrete import line_of
from piper_ir.ground.errors import CaptureError

EXAMPLE_ROWS = 6
"""The number of rows of the symbolic capture. A model that compares its rows with any fixed number is refused."""


NONE: OutputMetrics = {}
"""No metrics."""


def step(
    model: nn.Module,
    loss: Loss,
    inputs: Any,
    targets: Any,
    joined: frozenset[str] = frozenset(),
    metrics: OutputMetrics = NONE,
) -> tuple[Any, ...]:
    """Return the captured results: the loss of a batch, and its weight if the user's loss gives one.

    Both are float32 at least: three digits of bfloat16 are too few for a loss, and for a sum of weights. If there are
    metrics, a dict of them comes last. They get the targets, or the inputs if there are no targets.
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
    losses = _losses(result)
    if not metrics:
        return losses
    return *losses, measured(
        metrics, output, inputs if targets is None else targets, losses[0].dtype
    )


def _losses(result: Any) -> tuple[Tensor, ...]:
    if type(result) in (list, dict):  # Dynamo does not trace isinstance of a union of types
        result = _sum_of_means(result)
    total, *rest = result if isinstance(result, tuple) else (result,)
    if isinstance(total, Tensor) and total.dtype in (torch.bfloat16, torch.float16):
        total = total.float()
    if not isinstance(result, tuple):
        return (total,)
    (weight,) = rest
    if isinstance(weight, Tensor):
        return total, weight.detach().to(total.dtype)
    return total, torch.full((), weight, dtype=total.dtype)


def _sum_of_means(pairs: list[Any] | dict[str, Any]) -> Any:
    """Return the sum of several means, each a pair (sum, weight); return anything else unchanged."""
    means = list(pairs.values()) if isinstance(pairs, dict) else pairs
    for pair in means:
        if not isinstance(pair, tuple) or len(pair) != 2:
            return pairs
    total: Any = 0.0
    for part, weight in means:
        total = total + part / (weight.detach() if isinstance(weight, Tensor) else weight)
    return total


@dataclass
class Recorder:
    """Keep the graph that torch.compile hands to its backend, and return its fake outputs in place of a run."""

    batch: Collection[int]
    module: fx.GraphModule | None = None
    inputs: Sequence[Any] = ()
    outputs: list[Any] = field(default_factory=list)
    problem: CaptureError | None = None
    checkpoints: list[str] = field(default_factory=list)
    autocasts: tuple[str, ...] = ()
    kernel_choices: list[str] = field(default_factory=list)

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
        """Replace calls of regions and checkpoints in the graph by their operations, and drop choices of kernels."""
        if self.module is not None:
            self.inputs = complete(self.module, self.inputs)
            flatten(self.module)
            self.checkpoints = open_checkpoints(self.module)
            self.kernel_choices = drop_kernel_choices(self.module)

    def graph_module(self) -> fx.GraphModule:
        """Return the traced graph; raise CaptureError if Dynamo made none."""
        if self.module is None:
            raise CaptureError(
                "the loss does not depend on any tensor operation; compute it from the output of the model"
            )
        return self.module

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes for the model's author about changes to the graph."""
        return (*checkpoint_note(self.checkpoints), *self.autocasts)

    def node_of(self, value: Any) -> fx.Node | None:
        """Return the output node whose fake value is this very object."""
        assert self.module is not None
        nodes = self.module.graph.output_node().args[0]
        assert isinstance(nodes, list | tuple)
        return next(
            (
                n
                for n, v in zip(nodes, self.outputs, strict=True)
                if v is value and isinstance(n, fx.Node)
            ),
            None,
        )


@dataclass(frozen=True)
class StepCall:
    """Hold the call of `step` that is traced: model, loss and metrics, on an example of the batch."""

    model: nn.Module
    loss: Loss
    example: Example
    metrics: OutputMetrics


def followed(
    call: StepCall,
    regions: AutomaticRegions,
    statements: Statements,
    modules: Mapping[str, nn.Module],
) -> tuple[Recorder, tuple[Any, ...]]:
    """Trace a step, again for each module that must become opaque; `modules` are by id, as in nn_module_stack."""
    locked = LockedCalls()
    while True:
        recorder = Recorder({id(t) for t in call.example.rows.values()})
        try:
            with statements.running(), locked.noted():
                result = _run(recorder, call, regions)
        except _Unfollowed as found:
            if why := regions.take_written(found.module, found.line, found.reason):
                raise CaptureError(f"{found.error} {why}") from found
            continue
        except CaptureError:
            if not (regions.take_larger() or locked.make()):
                raise
            continue
        graph = recorder.graph_module().graph
        if not _taken(list(causes(graph, lambda node: is_opaque(node, modules))), regions, modules):
            regions.settle(graph)
            recorder.autocasts = write_casts(graph)
            return recorder, result


def _taken(
    found: Sequence[Untraceable], regions: AutomaticRegions, modules: Mapping[str, nn.Module]
) -> bool:
    """Make the modules of causes opaque; return whether one runs as it is written now, so that this trace is void.

    Remaining causes are refused later, by name.
    """
    for cause in found:
        module = module_of(cause.node, modules)
        if (
            cause.recurrent
            and module is not None
            and module is not regions.model
            and not is_opaque(cause.node, modules)
        ):
            regions.take_opaque(module, line_of(cause.node), cause.text)
        elif not cause.recurrent:
            why = regions.take_written(module, line_of(cause.node), cause.text)
            if why and cause.as_it_is:
                raise cause.refusal(why)
            if not why:
                return True
    return False


class _Unfollowed(Exception):
    """Report that Dynamo cannot follow values of tensors in a module.

    Attributes:
        error: the refusal, if the module cannot run as it is written.
        module: the innermost module with the cause, None outside of the model.
    """

    def __init__(
        self, error: CaptureError, module: nn.Module | None, line: str, reason: str
    ) -> None:
        super().__init__(str(error))
        self.error, self.module, self.line, self.reason = error, module, line, reason


def _run(recorder: Recorder, call: StepCall, regions: AutomaticRegions) -> tuple[Any, ...]:
    with (
        _torch.own_settings(),
        attention_modules_traced(),
        requires_grad_traced(),
        losses_traced(),
        torch.enable_grad(),
        regions.planning(),
    ):
        if repeated := repeated_layers(call.model):
            try:
                with as_regions(call.model, repeated):
                    return _traced(recorder, call)
            except (
                Exception
            ):  # the plain trace gives a graph, or raises an error in the user's terms
                recorder.problem = None
        try:
            with _torch.regions_apart(), failing_module() as failing:
                return _traced(recorder, call)
        except _torch.CAPTURE_ERRORS as error:
            refusal = (
                regions.problem
                or recorder.problem
                or as_capture_error(error, __file__, call.example.tensors)
            )
            if refusal in (regions.problem, recorder.problem) or not follows_values(error):
                raise refusal from error
            where, _, reason = str(refusal).partition(": cannot be captured: ")
            reason, module = cause_of(reason), failing.module
            if place := failing.made(error):
                module, line = place
                reason = "a size, or a Python number, depends on values of tensors"
                refusal = CaptureError(
                    f"{line}: cannot be captured: {reason}, and is used in {where or 'the loss'}."
                )
                where = line
            raise _Unfollowed(refusal, module, where, reason) from error
        except NotFlat as error:
            raise CaptureError(
                f"a nested compile region of the model's cannot be captured: {error}; remove "
                f"torch.compiler.nested_compile_region, or use it only around code that calls no other region"
            ) from error


def _traced(recorder: Recorder, call: StepCall) -> tuple[Any, ...]:
    example = call.example
    result = _torch.compile_once(step, recorder)(
        call.model, call.loss, example.inputs, example.targets, example.joined, call.metrics
    )
    recorder.clean()
    assert isinstance(result, tuple)
    return result


def _specialised(
    module: fx.GraphModule, inputs: Sequence[Any], batch: Collection[int]
) -> CaptureError | None:
    """Return the error for a model that fixed the number of rows while it was traced."""
    nodes = module.graph.find_nodes(op="placeholder")
    rows = [
        n.meta["example_value"].shape[0]
        for n, v in zip(nodes, inputs, strict=True)
        if id(v) in batch
    ]
    if all(_torch.is_symbolic(r) for r in rows):
        return None
    lines = [
        g.line
        for g in row_guards(module.graph)
        if g.line and re.search(rf"Eq\(.*\b{EXAMPLE_ROWS}\b", str(g.expr))
    ]
    lines += [line_of(node) for node in module.graph.nodes if _torch.is_transform(node.target)]
    return CaptureError(
        f"{lines[0] if lines else 'the model'}: the number of rows of the batch is compared or combined with a "
        f"constant; remove the constant, because Piper chooses the rows of each microbatch (capture used "
        f"{EXAMPLE_ROWS}). A loop over the rows (list(x), x.unbind(0)) and torch.vmap over them fix their number, "
        f"too: compute on all rows at once, or leave out what makes the model do so. An operator that does so "
        f"inside is written with others: torch.kron with torch.einsum and reshape, torch.take_along_dim with gather"
    )
