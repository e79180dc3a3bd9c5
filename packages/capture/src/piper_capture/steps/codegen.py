"""Write the Python source of a step, one line per op, and compile it.

The function takes one list and empties it, so that a tensor without a reference in the caller is freed at its last
use:

    def step(args):
        in0, in1, saved0 = args
        args.clear()
        mm = in0.mm(in1); del in0, in1  # model.py:12
        ...
        return (mm.contiguous(),)

The text depends on the graph alone. Each op is followed by its user line in a comment, for messages. Ops are bound
once as globals, and the device of factory ops is the global DEVICE.
A fusion is a call of the function that the global FUSION makes of its text, shapes and dtypes.
A collective is a call of the global EXCHANGE, or of POST, which starts it and returns a function that waits for the
result; an op with several collectives is a call of one of ROUNDS, and a device's coordinate along an axis is
PLACE[axis]. All come from the engine that runs the step. The function that such an op runs in each
round is defined before the step. A random operation is a call of `draw` with its number in the chunk. Views are printed
as reshape, because strides on the running device may differ from the strides in the capture.
"""

from __future__ import annotations

import hashlib
import linecache
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx

from piper_capture.graphs.closures import is_random
from piper_capture.graphs.stepgraph import StepGraph
from piper_capture.steps import exchanges
from piper_capture.steps.draws import DRAW, DRAWN_PART
from piper_capture.steps.schedule import Line
from piper_capture.torch_api._torch_joint import OpOverload
from piper_capture.values import aliasing
from piper_capture.values.concrete import frame_of
from piper_capture.values.coordinate import Coordinate
from piper_ir.ground.errors import CaptureError
from piper_ir.program.program import Step
from piper_ops import (
    COLLECTIVE_KINDS,
    ROUNDS,
    compiled_fusion,
    dtype_name,
    fusion,
    is_model_code,
    wait,
)

aten = torch.ops.aten
METHODS: Mapping[OpOverload, str] = {
    aten.view.default: "reshape",
    aten._unsafe_view.default: "reshape",
    aten.t.default: "t",
    aten.transpose.int: "transpose",
    aten.permute.default: "permute",
    aten.expand.default: "expand",
    aten.unsqueeze.default: "unsqueeze",
    aten.select.int: "select",
    aten.mm.default: "mm",
    aten.bmm.default: "bmm",
    aten.addmm.default: "addmm",
    aten.addmm_.default: "addmm_",
    aten.addcmul_.default: "addcmul_",
    aten.add.Tensor: "add",
    aten.add_.Tensor: "add_",
    aten.mul.Tensor: "mul",
    aten.mul_.Tensor: "mul_",
    aten.sum.dim_IntList: "sum",
}
"""The ops printed as a method of their first argument, which saves the host about 1 us against the OpOverload."""
FUNCTIONS: Mapping[OpOverload, str] = {
    aten.cat.default: "torch.cat",
    aten.embedding.default: "torch.embedding",
    aten.stack.default: "torch.stack",
}
"""The ops that are not methods and are printed as functions, for the same reason."""
SPREAD = frozenset({"reshape", "permute", "expand"})
"""The methods whose list of sizes or dimensions is printed as separate arguments, which saves half a microsecond."""


@dataclass(frozen=True)
class StepCode:
    """Hold the source of `step(args: list[Tensor]) -> tuple[Tensor, ...]`, which empties `args`, and its constants."""

    source: str
    constants: Mapping[str, Tensor] = field(default_factory=dict)


def generate(
    step: Step, graph: StepGraph, lines: Sequence[Line], constants: Mapping[str, Tensor]
) -> StepCode:
    """Return code that runs `lines`.

    Its arguments are the ports that the step reads, in order, then one accumulator per accumulated parameter.
    """
    names = [n.name for n in graph.graph.find_nodes(op="placeholder")]
    ops = dict.fromkeys(op for line in lines if not _bound(op := _op(line)))
    used = dict.fromkeys(str(n.target) for n in graph.graph.find_nodes(op="get_attr"))
    results = "".join(f"{_literal(n)}.contiguous(), " for n in _outputs(graph))
    drawing = any(map(_draws, lines))
    source = [
        f"# step {step}",
        *(["from piper_ops import draw", ""] if drawing else []),
        *(
            f"{_global(op)} = torch.ops.{op._schema.name.replace('::', '.')}.{op._overloadname}"
            for op in ops
        ),
        *exchanges.bodies(line.node for line in lines),
        *_fusions(lines),
        "",
        "",
        "def step(args):",
        *([f"    {', '.join(names)}, = args"] if names else []),
        "    args.clear()",
        *(f"    {_line(line)}{_place(line.node)}" for line in lines),
        f"    return ({results.rstrip()})",
        "",
    ]
    return StepCode("\n".join(source), {name: constants[name] for name in used})


def fusion_source(
    nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> str:
    """Return the text of a function `fusion` that runs operations and views on the tensors of a list.

    Variables are numbered, so that equal fusions have equal texts.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for k, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"a{k}")
    for k, node in enumerate(nodes):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = graph.create_node(node.op, node.target, args, kwargs, f"v{k}")
    names = "".join(f"{n.name}, " for n in graph.find_nodes(op="placeholder"))
    return "\n".join(
        [
            "def fusion(args):",
            *([f"    {names.rstrip()} = args"] if names else []),
            "    args.clear()",
            *(f"    {copies[n].name} = {_inside_fusion(copies[n])}" for n in nodes),
            f"    return ({''.join(f'{copies[n].name}, ' for n in outputs).rstrip()})",
            "",
        ]
    )


def _inside_fusion(node: fx.Node) -> str:
    """Return the text of an operation in a fusion."""
    if node.target is operator.getitem:
        source, place = node.args
        return f"{_literal(source)}[{place}]"
    keywords = [f"{name}={_literal(value)}" for name, value in node.kwargs.items()]
    # in a step, too, a view may be of other strides than it was captured with
    again = METHODS.get(cast(OpOverload, node.target)) == "reshape"
    target = aten.reshape.default if again else node.target
    return f"torch.ops.{target}({', '.join([*map(_literal, node.args), *keywords])})"


def input_specs(nodes: Iterable[fx.Node]) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Return the shapes and dtypes of nodes, which are a part of the text of a fusion that reads them."""
    return tuple((tuple(v.shape), dtype_name(v.dtype)) for v in map(aliasing.tensor, nodes))


def _fusions(lines: Sequence[Line]) -> list[str]:
    """Return the lines that bind the compiled forms of a step's fusions."""
    calls: dict[str, str] = {}
    for line in lines:
        if line.node.target is fusion:
            parts = str(line.node.args[1]).splitlines(keepends=True)
            text = "\n".join(f"    {part!r}" for part in parts)
            specs = input_specs(line.node.all_input_nodes)
            calls[_fusion_name(line.node)] = f"FUSION(\n{text},\n    {specs},\n)"
    return [line for name, call in calls.items() for line in ("", f"{name} = {call}")]


def _fusion_name(node: fx.Node) -> str:
    facts = f"{node.args[1]} {input_specs(node.all_input_nodes)}"
    return f"fusion_{hashlib.sha256(facts.encode()).hexdigest()[:8]}"


def compile_step(
    code: StepCode, device: str | torch.device = "cpu"
) -> Callable[[list[Tensor]], tuple[Tensor, ...]]:
    """Return the function of a step, for tensors on `device`.

    It must be called under `torch.no_grad()`. Tracebacks show the generated lines. Raises CaptureError when an op of
    the code is not registered in this process.
    """
    filename = f"<piper {code.source.splitlines()[0][2:]} {hashlib.sha256(code.source.encode()).hexdigest()[:8]}>"
    namespace: dict[str, Any] = {
        "torch": torch,
        "DEVICE": torch.device(device),
        "FUSION": partial(compiled_fusion, device=device),
    }
    namespace |= {name: value.to(device) for name, value in code.constants.items()}
    linecache.cache[filename] = (
        len(code.source),
        None,
        code.source.splitlines(keepends=True),
        filename,
    )
    try:
        exec(compile(code.source, filename, "exec"), namespace)
    except AttributeError as error:
        raise CaptureError(
            f"{error}; import the module that registers the op where the job is defined"
        ) from error
    function: Callable[[list[Tensor]], tuple[Tensor, ...]] = namespace["step"]
    return function


def _outputs(graph: StepGraph) -> tuple[fx.Node, ...]:
    written = graph.graph.output_node().args[0]
    assert isinstance(written, tuple)
    return written  # type: ignore[return-value]  # the outputs of a step are nodes


def _place(node: fx.Node) -> str:
    """Return the user's line as a comment; "" if it is not known."""
    frame = frame_of(node)
    return f"  # {frame[0]}:{frame[1]}" if frame and is_model_code(frame[0]) else ""


def _line(line: Line) -> str:
    node = line.node
    keywords = [f"{name}={_literal(value)}" for name, value in node.kwargs.items()]
    op = _op(line)
    args = list(node.args)
    if METHODS.get(op) in SPREAD and isinstance(args[1], list | tuple) and args[1]:
        args[1:2] = args[1]
    first, *rest = [*map(_literal, args), *keywords] or [""]
    if op in COLLECTIVE_KINDS:
        call = exchanges.call(node, first)
    elif op is wait:
        call = f"{first}()"
    elif op in ROUNDS:
        call = exchanges.meeting(op, [first, *rest], args)
    elif op is fusion:
        inputs = ", ".join(
            n.name + ".contiguous()" * (n.op == "call_function") for n in node.all_input_nodes
        )
        call = f"{_fusion_name(node)}([{inputs}])"
    elif op in METHODS and isinstance(args[0], fx.Node):
        call = f"{first}.{METHODS[op]}({', '.join(rest)})"
    elif op in METHODS:  # torch.add(0.5, x) has a number as first argument
        call = f"torch.ops.{op}({', '.join([first, *rest])})"
    elif _draws(line):
        part = [f"part={_literal(node.meta[DRAWN_PART])}"] if DRAWN_PART in node.meta else []
        call = f"draw({', '.join([str(node.meta[DRAW]), _global(op), first, *rest, *part])})"
    else:
        call = f"{FUNCTIONS.get(op) or _global(op)}({', '.join([first, *rest])})"
    return _assigned(line, call, line.drops)


def _assigned(line: Line, call: str, drops: Sequence[fx.Node]) -> str:
    """Return the text that assigns the results of a call to variables, and deletes the variables in `drops`."""
    node = line.node
    if line.makes == (node,):
        return f"{node.name} = {call}" + (
            f"; del {', '.join(n.name for n in drops)}" if drops else ""
        )
    items = "; ".join(f"{item.name} = {node.name}[{item.args[1]}]" for item in line.makes)
    return f"{node.name} = {call}; {items}; del {', '.join(n.name for n in (node, *drops))}"


def _draws(line: Line) -> bool:
    """Return whether a line draws random numbers, so that it is printed as a call of `draw`."""
    return is_random(line.node)


def _bound(op: OpOverload) -> bool:
    """Return whether the text calls an op without a global of its own."""
    return (
        any(op in known for known in (METHODS, FUNCTIONS, COLLECTIVE_KINDS, ROUNDS))
        or op is fusion
        or op is wait
    )


def _op(line: Line) -> OpOverload:
    target = line.node.target
    assert isinstance(target, OpOverload)
    return target


def _global(op: OpOverload) -> str:
    return f"_{op._schema.name.replace('::', '_').replace('.', '_')}_{op._overloadname}"


def _literal(value: Any) -> str:
    """Return the Python text of an argument; raise CaptureError for a type that has none."""
    match value:
        case fx.Node():
            return str(value.target) if value.op == "get_attr" else value.name
        case Coordinate():
            return f"{'-1 - ' if value.mirrored else ''}PLACE[{value.axis!r}]"
        case None | bool() | int() | str():
            return repr(value)
        case float():
            return repr(value) if math.isfinite(value) else f"float('{value}')"
        case complex():
            return f"complex({_literal(value.real)}, {_literal(value.imag)})"
        case torch.device():
            return "DEVICE"
        case torch.dtype() | torch.memory_format() | torch.layout():
            return str(value)
        case list():
            return f"[{', '.join(map(_literal, value))}]"
        case tuple():
            return f"({''.join(f'{_literal(v)}, ' for v in value).rstrip()})"
    raise CaptureError(
        f"an argument of type {type(value).__name__} in a captured op cannot be written as code"
    )
