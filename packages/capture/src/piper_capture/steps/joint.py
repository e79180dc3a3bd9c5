"""Trace one chunk's forward and backward into a functional graph, and cut the graph into steps.

The chunk is traced on fake CPU tensors, whatever device its examples are on, so that capture on meta, on fake and on
real tensors gives the same graph. Inputs that the chunk changes in place are copied first and returned as further
outputs. Every output is copied (and detached if it gets no gradient), so that each has a gradient of its own.
Simplification (`piper_capture.graphs`) removes unneeded copies.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.fx.traceback
from torch import fx

from piper_capture.graphs.rewrites import rewrite_joint, rewrite_step
from piper_capture.graphs.stepgraph import Joint
from piper_capture.steps import exchanges, kernels, liveness, phases
from piper_capture.steps.codegen import StepCode, generate
from piper_capture.steps.draws import Drawn, drawn_in, number_draws
from piper_capture.steps.expert_region import expert_regions, has_experts
from piper_capture.steps.filling import fill
from piper_capture.steps.fusions import fuse
from piper_capture.steps.schedule import schedule
from piper_capture.torch_api import _torch_joint
from piper_capture.torch_api._torch_joint import OpOverload
from piper_capture.values import aliasing
from piper_capture.values.casts import CASTS
from piper_ir.ground.errors import CaptureError
from piper_ir.ground.sizes import TensorSpec
from piper_ir.program.program import Signature, Step
from piper_ops import dtype_name, is_model_code

aten = torch.ops.aten

OF_ONE_DTYPE = (
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten.index_add.default,
    aten.index_copy.default,
    aten.index_put.default,
    aten.grid_sampler_2d.default,
    aten.grid_sampler_3d.default,
)
"""The ops whose kernels take tensors of one floating-point dtype only."""


@dataclass(frozen=True)
class JointInput:
    """Describe one input of the chunk; inputs are in the order of the module's placeholders.

    Attributes:
        example: only its shape and dtype matter.
        needs_grad: whether its gradient is computed: a value's goes back to its producer, a parameter's trains it.
    """

    kind: Literal["value", "param", "buffer", "batch"]
    example: torch.Tensor
    needs_grad: bool = False


@dataclass(frozen=True)
class TracedChunk:
    """Hold a chunk's steps, with plain integers as sizes; costs list every launch separately.

    Attributes:
        ports: as in `piper_ir.program.program`.
        steps: likewise.
        code: an entry per step that is not empty.
        output_grads: whether a step reads the gradient of output k; after the module's own outputs follow the values
            that the chunk changes in place. True in the mask becomes False if no input's gradient depends on it.
        input_grads: whether the chunk makes the gradient of input k.
        random: whether F draws random numbers.
        draws: its random operations, in the order of the program.
    """

    ports: Mapping[str, TensorSpec]
    steps: Mapping[Step, Signature]
    code: Mapping[Step, StepCode]
    output_grads: tuple[bool, ...]
    input_grads: tuple[bool, ...]
    random: bool
    draws: tuple[Drawn, ...] = ()


def cut_chunk(
    joint: Joint,
    keep: str,
    inside: Sequence[Collection[str] | None] = (None,),
    fused: Collection[Step] = (),
    usual: TracedChunk | None = None,
) -> TracedChunk:
    """Return the steps of a traced chunk under a policy of recomputation; the joint graph stays as it is.

    `inside` are the origins of the operations for which each of the policies beside each other holds; None for all.
    In the steps `fused`, operations become fusions, which Inductor compiles. B is one of them unless devices share
    experts, or R makes outputs for others; then R, I and W are in its place.
    From `usual`, the same chunk without a policy, are the steps that are equal, unless regions of experts need graphs.
    """
    if usual is not None and any(sig.experts is not None for sig in usual.steps.values()):
        usual = None
    cut = phases.cut(
        joint,
        keep,
        inside,
        None if usual is None else usual.output_grads,
        joined="B" in fused and not has_experts(joint.graph),
    )
    if "B" not in cut.steps and "B" in fused:
        fused = {*fused, "R", "I", "W"}
    steps: dict[Step, Signature] = {}
    code: dict[Step, StepCode] = {}
    for step, graph in cut.steps.items():
        if step in fused:
            fuse(graph)
        fill(graph)
        rewrite_step(graph)
    regions = expert_regions(cut.steps)
    for step, graph in cut.steps.items():
        lines = schedule(graph)
        steps[step] = Signature(
            graph.reads,
            graph.writes,
            graph.accumulates,
            kernels.cost(graph.graph.nodes),
            liveness.analyse(graph, lines),
            exchanges.inside(graph),
            regions.get(step),
            exchanges.overlapped(graph),
        )
        if not steps[step].empty:
            code[step] = generate(step, graph, lines, joint.constants)
    if usual is not None:
        steps |= {step: usual.steps[step] for step in ("I", "W")}
        code |= {step: usual.code[step] for step in ("I", "W") if step in usual.code}
    return TracedChunk(
        cut.ports, steps, code, cut.output_grads, cut.input_grads, cut.random, drawn_in(joint.graph)
    )


def trace_joint(
    module: fx.GraphModule,
    inputs: Sequence[JointInput],
    tangent_mask: Sequence[bool],
    reduce: torch.dtype | None = None,
) -> Joint:
    """Return the functional graph of the forward and backward of `module`, whose placeholders are `inputs`.

    W adds to accumulators of the dtype `reduce`.

    The module returns a tensor or a flat tuple of tensors. tangent_mask[k] says whether output k receives a gradient;
    entries for the values that the module changes in place follow, in the order of the inputs. Raises CaptureError,
    with the user's line if it is known, for code that cannot be traced or made functional.
    """
    return replace(_traced_joint(module, inputs, tangent_mask), reduce=reduce)


def _traced_joint(
    module: fx.GraphModule, inputs: Sequence[JointInput], tangent_mask: Sequence[bool]
) -> Joint:
    constants = constants_of(module)
    wrapper = _Wrapper(module, constants, len(inputs), (), tangent_mask)
    raw = _export(wrapper, module, inputs, constants)
    mutated = raw.mutated
    if mutated:
        _refuse_changed_parameters(module, inputs, mutated)
        # A buffer has no gradient; its new value has an entry in the wrapper's mask all the same.
        values = [k for k in mutated if inputs[k].kind != "buffer"]
        own = wrapper.outputs
        if len(tangent_mask) == own and not any(inputs[k].needs_grad for k in values):
            tangent_mask = (*tangent_mask, *(False for _ in values))
        if len(tangent_mask) != own + len(values):
            raise CaptureError(
                f"the chunk changes {len(values)} of its inputs in place, so tangent_mask needs "
                f"{own + len(values)} entries, one per output and one per changed value, not {len(tangent_mask)}"
            )
        rest = iter(tangent_mask[own:])
        mask = (*tangent_mask[:own], *(inputs[k].kind != "buffer" and next(rest) for k in mutated))
        wrapper = _Wrapper(module, constants, len(inputs), mutated, mask)
        raw = _export(wrapper, module, inputs, constants)
        if raw.mutated:
            raise CaptureError(
                f"an in-place change of input {raw.mutated[0]} cannot be made functional{_where(wrapper.node)}"
            )
    elif len(tangent_mask) != wrapper.outputs:
        raise CaptureError(
            f"the chunk has {wrapper.outputs} outputs but tangent_mask has {len(tangent_mask)} entries"
        )
    return _joint(raw, inputs, constants, mutated)


def _joint(
    raw: _torch_joint.RawJoint,
    inputs: Sequence[JointInput],
    constants: Mapping[str, torch.Tensor],
    mutated: tuple[int, ...],
) -> Joint:
    graph = raw.graph
    _check(graph)
    buffers = [
        raw.primals[k] for k, joint_input in enumerate(inputs) if joint_input.kind == "buffer"
    ]
    rewrite_joint(graph, buffers)
    number_draws(graph)
    aliasing.show_whole_storages(graph)
    results, gradients = _torch_joint.results_and_gradients(graph)
    names = {raw.primals[len(inputs) + i]: f"constant{i}" for i in range(len(constants))}
    values = {f"constant{i}": value for i, value in enumerate(constants.values())}
    for node in graph.find_nodes(op="get_attr"):
        value = getattr(raw.owner, str(node.target))
        if not isinstance(value, torch.Tensor) or _torch_joint.is_fake(value):
            raise CaptureError(
                f"a constant of type {type(value).__name__} cannot be kept{_where(node)}; pass it as an input"
            )
        names[node] = f"constant{len(values)}"
        values[names[node]] = value
    return Joint(
        graph=graph,
        kinds=tuple(i.kind for i in inputs),
        inputs=tuple(raw.primals[k] for k in range(len(inputs))),
        outputs=tuple(results[k] for k in range(len(results))),
        tangents=raw.tangents,
        grads={k: g for k, g in gradients.items() if k < len(inputs)},
        mutated=mutated,
        constant_names=names,
        constants=values,
    )


class _Wrapper(torch.nn.Module):
    """Wrap the chunk for the trace: constants are arguments, in-place changes go to copies, outputs own their bytes."""

    def __init__(
        self,
        module: fx.GraphModule,
        constants: Mapping[str, torch.Tensor],
        inputs: int,
        mutated: Sequence[int],
        mask: Sequence[bool],
    ) -> None:
        super().__init__()
        self.constants = constants
        self._interpreter: Interpreter | None = None
        self.outputs = 0
        # In a tuple, so that the chunk's own tensors do not become parameters and buffers of the wrapper.
        self._chunk = (module,)
        self._inputs, self._mutated, self._mask = inputs, mutated, mask

    @property
    def node(self) -> fx.Node | None:
        """Return the node that ran last."""
        return self._interpreter.node if self._interpreter is not None else None

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [
            a.clone() if k in self._mutated else a for k, a in enumerate(args[: self._inputs])
        ]
        constant_by_name = dict(zip(self.constants, args[self._inputs :], strict=True))
        elsewhere = torch.get_default_device().type != "cpu"
        with (
            torch.device("cpu") if elsewhere else nullcontext(),  # it costs a call per operation
            torch.fx.traceback.preserve_node_meta(),
        ):
            self._interpreter = Interpreter(self._chunk[0], constant_by_name)
            result = self._interpreter.run(*values)
        outputs = [
            *(result if isinstance(result, list | tuple) else (result,)),
            *(values[k] for k in self._mutated),
        ]
        self.outputs = len(outputs)
        for k, output in enumerate(outputs):
            if not isinstance(output, torch.Tensor):
                raise CaptureError(
                    f"output {k} of a chunk is {type(output).__name__}; only tensors cross from chunk to chunk"
                )
        return tuple(
            output.clone(memory_format=torch.contiguous_format)
            if k < len(self._mask) and self._mask[k]
            else _detached(output)
            for k, output in enumerate(outputs)
        )


def _detached(out: torch.Tensor) -> torch.Tensor:
    return out.detach().clone(memory_format=torch.contiguous_format)


class Interpreter(fx.Interpreter):
    """Run the captured chunk on one device, with constants as arguments and the CPU for devices written into the graph.

    `node` is the node that runs, or that has failed.
    """

    def __init__(self, module: fx.GraphModule, constants: Mapping[str, torch.Tensor]) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self.node: fx.Node | None = None
        self._constants = constants

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        return super().run_node(n)

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (
            self._constants[target]
            if target in self._constants
            else super().get_attr(target, args, kwargs)
        )

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.higher_order.tag_activation_checkpoint:
            raise CaptureError(
                f"torch.utils.checkpoint inside the model is not followed{_where(self.node)}; call the function "
                f"directly, which trains the same model"
            )
        return super().call_function(target, _on_cpu(args), _on_cpu(_cpu_keyword(kwargs)))

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in ("cpu", "cuda"):
            return args[0]
        if target == "to" and len(args) > 1 and isinstance(args[1], str):
            args = (args[0], "cpu", *args[2:])
        return super().call_method(target, _on_cpu(args), _on_cpu(_cpu_keyword(kwargs)))


def _on_cpu(value: Any) -> Any:
    return fx.node.map_aggregate(
        value, lambda v: torch.device("cpu") if isinstance(v, torch.device) else v
    )


def _cpu_keyword(kwargs: dict[str, Any]) -> dict[str, Any]:
    return kwargs if kwargs.get("device") is None else {**kwargs, "device": torch.device("cpu")}


def constants_of(module: fx.GraphModule) -> dict[str, torch.Tensor]:
    """Return the tensors that the captured graph holds as attributes, by attribute name."""
    constants: dict[str, torch.Tensor] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        value: Any = module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                raise CaptureError(
                    f"a tensor with gradient is baked into the chunk{_where(node)}; make it a "
                    f"parameter of the model"
                )
            if value.is_meta or _torch_joint.is_fake(value):
                raise CaptureError(
                    f"a constant tensor has no content{_where(node)}; register it as a buffer of the model"
                )
            constants[str(node.target)] = value
    return constants


def _export(
    wrapper: _Wrapper,
    module: fx.GraphModule,
    inputs: Sequence[JointInput],
    constants: Mapping[str, torch.Tensor],
) -> _torch_joint.RawJoint:
    placeholders = module.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(inputs):
        raise CaptureError(
            f"the chunk has {len(placeholders)} placeholders but {len(inputs)} inputs are described"
        )
    with _torch_joint.fake_mode():
        examples = [
            torch.empty(i.example.shape, dtype=i.example.dtype).requires_grad_(i.needs_grad)
            for i in inputs
        ]
        fixed = [torch.empty(c.shape, dtype=c.dtype) for c in constants.values()]
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")  # a refusal names its line whatever the user's filters hide
        try:
            with torch.enable_grad():
                return _torch_joint.export_joint(wrapper, [*examples, *fixed])
        except CaptureError:
            raise
        except (
            Exception
        ) as error:  # whatever the user's code or torch's tracer raises, told with the user's line
            # If the backward fails, autograd names the forward's line in a warning.
            blamed = next(
                (str(w.message) for w in heard if "Traceback of forward call" in str(w.message)), ""
            )
            where = _line_of(blamed) or _where(wrapper.node)
            message = str(error).strip().split("\n\n")[0].split(" Hint:")[0]
            raise CaptureError(
                f"cannot trace the forward and backward of a chunk{where}: {message}"
                f"{_out_of_place(wrapper.node)}"
            ) from error


def _out_of_place(node: fx.Node | None) -> str:
    """Return advice for an operation in place that torch fails to make functional, as masked_fill_ of a view."""
    name = str(node.target) if node is not None and node.op == "call_method" else ""
    if not name.endswith("_") or name.endswith("__"):
        return ""
    return (
        f"; if it is {name} that fails, let the model use the result of {name[:-1]} in place of it"
    )


def _refuse_changed_parameters(
    module: fx.GraphModule, inputs: Sequence[JointInput], mutated: Sequence[int]
) -> None:
    for k in mutated:
        if inputs[k].kind == "param":
            name = module.graph.find_nodes(op="placeholder")[k].name
            raise CaptureError(
                f"the model changes its parameter {name} in place while it runs; only an optimizer may do that"
            )


def _check(graph: fx.Graph) -> None:
    """Refuse, by name and user line, ops that are not functional or that exist on one kind of device only."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        target, name = node.target, str(node.target)
        if isinstance(target, OpOverload):
            if target._schema.is_mutable:
                raise CaptureError(
                    f"{name} changes a tensor in place and cannot be made functional{_where(node)}; a backward of "
                    f"your own may not change its gradient or a tensor of the forward: let it change a clone()"
                )
            if target in OF_ONE_DTYPE:
                _check_dtypes(node)
            if "mkldnn" in name or "for_cpu" in name or "_scaled_dot_product" in name:
                raise CaptureError(
                    f"{name} exists on one kind of device only and has no portable form{_where(node)}"
                )
        elif target.__module__ != "_operator":
            raise CaptureError(
                f"{name} cannot be cut into forward and backward steps{_where(node)}; custom ops must be "
                f"functional (torch.library, mutates_args=()), and a choice between values is written with "
                f"torch.where, not as control flow"
            )


def _check_dtypes(node: fx.Node) -> None:
    """Refuse operands of different floating-point dtypes, which fake tensors accept and kernels refuse."""
    operands = [t for n in node.all_input_nodes if (t := aliasing.tensor(n)).is_floating_point()]
    dtypes = dict.fromkeys(dtype_name(t.dtype) for t in operands)
    if len(dtypes) > 1:
        raise CaptureError(
            f"{node.target} takes tensors of one dtype, and these are {' and '.join(dtypes)}{_where(node)}. {CASTS}"
        )


def _where(node: fx.Node | None) -> str:
    """Return ' at file:line: code' of the user's line that made the node, or "" if it is not known."""
    return _line_of(str(node.meta.get("stack_trace") or "")) if node is not None else ""


def _line_of(trace: str) -> str:
    """Return ' at file:line: code' of the model's innermost frame in a printed stack."""
    lines = trace.splitlines()
    frames = [i for i, line in enumerate(lines) if line.lstrip().startswith('File "')]
    if not frames:
        return ""
    last = ([i for i in frames if is_model_code(lines[i].split('"')[1])] or frames)[-1]
    path, number = lines[last].split('"')[1], lines[last].split("line ")[1].split(",")[0]
    code = lines[last + 1].strip() if last + 1 < len(lines) else ""
    return f" at {path}:{number}: {code}"
