"""Cut a joint graph into the steps F, I and W, and R if a recomputation policy lets F save less.

    F   ancestors of the outputs, and the forward nodes that backward needs ("saved")
    R   the saved nodes that F does not keep, from inputs, outputs and kept nodes (`recompute`)
    I   ancestors of the gradients of values, among the nodes of backward
    W   the other ancestors of the gradients of parameters; only W accumulates
    B   R, I and W in one, for kernels that are compiled together; it hands nothing from one to the other

A step that needs a node of an earlier step gets it through a port, as the node's whole storage, unless it can *repeat*
the node: a view, an op without tensor inputs that draws no random numbers, a view or cast of a parameter (saving
`weight.t()` would keep a gathered parameter alive), or the rows that a device sends to experts elsewhere, which are
copies of its tokens (saving them would take k times the bytes of the tokens, which are mostly kept anyway). Inputs of
the chunk are read again, never saved. A storage that an output port owns already is read from there. A parameter's
gradient that I computes on the way goes to W like any other node.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from piper_capture.graphs.closures import ancestors, close, drawn_before, is_random
from piper_capture.graphs.stepgraph import (
    Joint,
    StepBuilder,
    StepGraph,
    Storage,
    spec_of,
    whole,
)
from piper_capture.steps.recompute import KeepPolicy, made_again
from piper_capture.torch_api import _torch_joint
from piper_capture.values import aliasing
from piper_ir.ground.errors import CaptureError
from piper_ir.ground.sizes import TensorSpec
from piper_ir.program.ops import BESIDE, HANDS_ON, KEEP_ALL
from piper_ir.program.program import Step
from piper_ops import ROUNDS, route

aten = torch.ops.aten


@dataclass(frozen=True)
class ChunkSteps:
    """Hold the steps of a chunk.

    Attributes:
        ports: the specs of the tensors that cross between steps and chunks.
        output_grads: whether a step reads tan{k}.
        input_grads: whether a step makes the gradient of input k.
        random: whether F draws random numbers.
    """

    steps: Mapping[Step, StepGraph]
    ports: Mapping[str, TensorSpec]
    output_grads: tuple[bool, ...]
    input_grads: tuple[bool, ...]
    random: bool


def cut(
    joint: Joint,
    keep: str = KEEP_ALL,
    inside: Sequence[Collection[str] | None] = (None,),
    output_grads: tuple[bool, ...] | None = None,
    *,
    joined: bool = False,
) -> ChunkSteps:
    """Return the steps of a chunk under a recomputation policy, and the specs of its ports.

    `inside` are the origins of the operations for which each of the policies beside each other holds; None for all. I
    and W are the same under any policy, and left out if `output_grads` are known from another. There is a step B if it
    should be there (`joined`), except where R makes outputs again, which other chunks read before B would be done.
    """
    rank = {n: i for i, n in enumerate(joint.graph.nodes)}
    backward = backward_nodes(joint)
    values = {k: g for k, g in sorted(joint.grads.items()) if joint.kinds[k] == "value"}
    params = {k: g for k, g in sorted(joint.grads.items()) if joint.kinds[k] == "param"}

    step_i = close(values.values(), lambda n: n in backward or _repeatable(n, joint))
    step_w = close(
        params.values(),
        lambda n: (
            (n in backward and aliasing.producer(n) not in step_i.body) or _repeatable(n, joint)
        ),
    )
    handed = sorted(
        (n for n in step_w.needs if aliasing.producer(n) in step_i.body), key=rank.__getitem__
    )
    saved = sorted(
        (
            n
            for n in step_i.needs | step_w.needs
            if n.op == "call_function" and n not in handed and n not in backward
        ),
        key=rank.__getitem__,
    )
    needed = ancestors([*joint.outputs, *saved])
    body_f = {
        n
        for n in ancestors([*needed, *drawn_before(needed, joint.graph.nodes)])
        if n.op == "call_function"
    }
    _refuse_late_randomness(body_f, step_i.body | step_w.body)
    _refuse_changed_buffers(joint, step_i.needs | step_w.needs)

    placed: dict[fx.Node, Storage] = {n: whole(f"in{k}", n) for k, n in enumerate(joint.inputs)}
    placed |= {n: whole(f"tan{k}", n) for k, n in joint.tangents.items()}
    build = partial(StepBuilder, joint, rank)
    f = build(body_f, placed)
    f.write((f"out{k}", n) for k, n in enumerate(joint.outputs))
    f.hand_over("saved", saved)
    i = build(step_i.body | set(handed), placed | f.placed)
    i.write((f"gin{k}", n) for k, n in values.items())
    i.hand_over("iw", handed)
    w = build(step_w.body, placed | f.placed | i.placed)
    w.accumulate(params)
    steps, again, kept = _forward(joint, keep, inside, f, body_f, placed)
    if output_grads is None:
        steps |= {"I": i.finish(), "W": w.finish()}
        read = {port for step in steps.values() for port in step.reads}
        output_grads = tuple(f"tan{k}" in read for k in range(len(joint.outputs)))
    if joined and not keep.endswith(HANDS_ON):
        b = build(again | step_i.body | set(handed) | step_w.body, {**placed, **kept})
        b.write((f"gin{k}", n) for k, n in values.items())
        b.accumulate(params)
        steps["B"] = b.finish()
    ports = {f"in{k}": spec_of(n) for k, n in enumerate(joint.inputs)}
    ports |= f.specs
    ports |= {f"tan{k}": spec_of(n) for k, n in enumerate(joint.outputs) if output_grads[k]}
    ports |= i.specs
    input_grads = tuple(k in values or k in params for k in range(len(joint.inputs)))
    return ChunkSteps(steps, ports, output_grads, input_grads, any(is_random(n) for n in body_f))


def _forward(
    joint: Joint,
    keep: str,
    inside: Sequence[Collection[str] | None],
    keeping: StepBuilder,
    body: set[fx.Node],
    placed: Mapping[fx.Node, Storage],
) -> tuple[dict[Step, StepGraph], set[fx.Node], Mapping[fx.Node, Storage]]:
    """Return F and R, or F alone if the policy saves all tensors. `keeping` builds the F that saves all.

    Beside them return the nodes that R computes, and the storages that F provides.
    """
    hands_on = keep.endswith(HANDS_ON)
    saved = {n: s for n, s in keeping.placed.items() if s.port.startswith("saved")}
    rank = {n: i for i, n in enumerate(joint.graph.nodes)}
    order = sorted(body, key=rank.__getitem__)
    names = [] if keep == KEEP_ALL else keep.removesuffix(HANDS_ON).split(BESIDE)
    policies = [KeepPolicy(name, where, order) for name, where in zip(names, inside)]
    left = [n for n in saved if not all(policy.keeps(n) for policy in policies)]
    if not left and not hands_on:
        return {"F": keeping.finish()}, set(), keeping.placed
    available = {
        n
        for n, s in keeping.placed.items()
        if n not in left and not (hands_on and s.port.startswith("out"))
    }

    def repeats(node: fx.Node) -> bool:
        made = node in keeping.placed or any(policy.repeats(node) for policy in policies)
        return made or _repeatable(node, joint)

    again = made_again([*left, *(joint.outputs if hands_on else ())], available, repeats)
    if not again.body:  # an output is an input, or is kept
        return {"F": keeping.finish()}, set(), keeping.placed
    # Tensors that backward does not need, as the input of a module that begins with a frozen product.
    more = [n for n in order if n in again.needs and n not in available]
    keeping.hand_over("saved", more, first=len(saved))
    provided = {n: s for n, s in keeping.placed.items() if n in available or n in more}
    r = StepBuilder(joint, rank, again.body, {**placed, **provided})
    r.write((f"out{k}", n) for k, n in enumerate(joint.outputs if hands_on else ()))
    r.write_again({n: saved[n] for n in left})
    kept = {n: s for n, s in {**saved, **provided}.items() if s.port.startswith("saved")}
    kept = {n: s for n, s in kept.items() if n not in left}
    f = StepBuilder(
        joint, rank, {n for n in ancestors([*joint.outputs, *kept]) if n in body}, placed
    )
    f.write((f"out{k}", n) for k, n in enumerate(joint.outputs))
    f.write_again(kept)
    return {"F": f.finish(), "R": r.finish()}, again.body, provided


def backward_nodes(joint: Joint) -> set[fx.Node]:
    """Return the nodes that run after the forward.

    They depend on another backward node, or were recorded in autograd's backward, or are of unknown origin and needed
    by no output.
    """
    outputs = ancestors(joint.outputs)
    backward: set[fx.Node] = set()
    for node in joint.graph.nodes:
        recorded = _torch_joint.recorded_in(node)
        after = any(n in backward for n in node.all_input_nodes)
        if (
            after
            or recorded == "backward"
            or (recorded is None and node.op == "call_function" and node not in outputs)
        ):
            backward.add(node)
    return backward


def _repeatable(node: fx.Node, joint: Joint) -> bool:
    """Return whether a later step may recompute the node, from storages that exist anyway."""
    if node.op != "call_function":
        return False
    if aliasing.is_view(node):
        return True
    if not node.all_input_nodes:
        return not is_random(node)
    if _sends_rows(node):
        return True
    return node.target is aten._to_copy.default and _of_parameter(node.all_input_nodes[0], joint)


def _sends_rows(node: fx.Node) -> bool:
    """Return whether a node makes the rows that a device sends to experts, which further rounds send again."""
    if node.target is route:
        return any(_sends_rows(item) for item in node.users)
    if node.target is not operator.getitem or node.args[1] != 0:
        return False
    return any(user.target in ROUNDS for user in node.users)


def _of_parameter(node: fx.Node, joint: Joint) -> bool:
    """Return whether a node is a parameter, or a view or cast of one."""
    while node.op == "call_function" and (
        aliasing.is_view(node) or node.target is aten._to_copy.default
    ):
        node = node.all_input_nodes[0]
    return node in joint.inputs and joint.kinds[joint.inputs.index(node)] == "param"


def _refuse_late_randomness(forward: set[fx.Node], later: set[fx.Node]) -> None:
    for node in later - forward:
        if is_random(node):
            raise CaptureError(
                f"{node.target} draws random numbers in the backward; draw them in the forward and save them"
            )


def _refuse_changed_buffers(joint: Joint, needs: set[fx.Node]) -> None:
    for k in joint.mutated:
        if joint.kinds[k] == "buffer" and joint.inputs[k] in needs:
            raise CaptureError(
                f"the backward of a chunk reads buffer input {k}, which the chunk changes in place; the next "
                f"microbatch would have overwritten it by then. Read a copy of the buffer (buffer.clone()) in the "
                f"forward"
            )
