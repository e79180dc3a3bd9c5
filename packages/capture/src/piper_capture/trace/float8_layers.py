"""Let the linear layers of a captured forward graph multiply in float8, as a job's precision says.

    before  y = linear(x, w, b)
    after   y = float8_linear(x, w, recipe) + b

Conditions
 1. At least one linear layer of the model that runs matches `modules` and not `keep`.
 2. Every pattern of `modules` and `keep` matches such a layer.
 3. A matching layer is not in an opaque region.
 4. The blocks of the recipe divide its features, and its tokens.
A layer stays in its dtype if 16 does not divide its features, which devices need, or if `Precision.keep` gives its
weight a dtype of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from piper_capture.module.tags import examples, is_opaque
from piper_capture.values.casts import Casts
from piper_capture.values.concrete import line_of
from piper_ir.ground.errors import CaptureError
from piper_ops import RECIPES, Builder, Examples, Float8, dtype_name, float8_linear

DIVISOR = 16
"""The number that must divide a layer's features (torch._scaled_mm)."""


@dataclass(frozen=True)
class _Layer:
    """Hold a call of a linear layer: its node, the name of its module, and its weight."""

    node: fx.Node
    name: str
    weight: Tensor


def quantise_layers(
    gm: fx.GraphModule, model: nn.Module, modules: Mapping[str, nn.Module], casts: Casts
) -> tuple[str, ...]:
    """Rewrite a graph in place, and return a note that names the layers; `modules` are by id, as in nn_module_stack.

    Raises CaptureError for the conditions above.
    """
    asked = casts.float8
    if asked is None:
        return ()
    layers = list(_layers(gm, model, modules))
    names = [layer.name for layer in layers]
    for pattern in (*asked.modules, *asked.keep):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise CaptureError(
                f"{_said(asked)}: no linear layer is called {pattern!r}; the model runs {examples(names)} "
                f"[float8 condition 2]"
            )
    chosen = [layer for layer in layers if _chosen(layer, asked, casts)]
    if not chosen:
        raise CaptureError(
            f"{_said(asked)}: no linear layer multiplies in float8: of {examples(names)} none has features that "
            f"{DIVISOR} divides and a weight in the dtype of the precision; leave float8 out, or choose other modules "
            f"[float8 condition 1]"
        )
    made = Examples()
    for layer in chosen:
        _check(layer, asked, modules)
        _quantise(gm.graph, layer.node, asked, made)
    gm.graph.lint()
    gm.recompile()
    others = [layer.name for layer in layers if layer not in chosen]
    stay = f"; in the dtype of the precision stay {examples(others)}" if others else ""
    return (
        f"{len(chosen)} linear layers multiply in float8 ({asked.recipe}): {examples([c.name for c in chosen])}{stay}",
    )


def _layers(
    gm: fx.GraphModule, model: nn.Module, modules: Mapping[str, nn.Module]
) -> Iterator[_Layer]:
    """Yield the calls of linear layers, in the order of the program."""
    names = {id(module): name for name, module in model.named_modules()}
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target is not F.linear:
            continue
        key = [*(node.meta.get("nn_module_stack") or {"": None})][-1].split("@")[0]
        module = modules.get(key)
        # a subclass with a forward of its own computes something else
        plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        if plain and isinstance(node.args[1], fx.Node):
            yield _Layer(node, names[id(module)], node.args[1].meta["example_value"])


def _chosen(layer: _Layer, asked: Float8, casts: Casts) -> bool:
    named = any(fnmatchcase(layer.name, p) for p in asked.modules)
    left = any(fnmatchcase(layer.name, p) for p in asked.keep)
    of_layer = casts.compute in (None, layer.weight.dtype)
    return named and not left and of_layer and not any(s % DIVISOR for s in layer.weight.shape)


def _check(layer: _Layer, asked: Float8, modules: Mapping[str, nn.Module]) -> None:
    if is_opaque(layer.node, modules):
        raise CaptureError(
            f"{line_of(layer.node)}: {layer.name} is in an opaque region, whose operations autograd runs as they are "
            f"written; give {_said(asked)[:-1]}, keep=({layer.name!r},)) [float8 condition 3]"
        )
    block, _ = RECIPES[asked.recipe].blocks
    if any(size % block for size in layer.weight.shape):
        raise CaptureError(
            f"{_said(asked)}: {layer.name} has a weight {tuple(layer.weight.shape)}, which blocks of {block} do not "
            f"divide; keep=({layer.name!r},) leaves it out, and the recipe 'rowwise' needs no blocks [float8 condition 4]"
        )
    narrow = [n.meta["example_value"].dtype for n in layer.node.args[:2] if isinstance(n, fx.Node)]
    if len(set(narrow)) > 1:
        raise CaptureError(
            f"{line_of(layer.node)}: {layer.name} multiplies {' and '.join(map(dtype_name, narrow))}; cast its input "
            f"to the dtype of its weight"
        )


def _quantise(graph: fx.Graph, node: fx.Node, asked: Float8, made: Examples) -> None:
    bound = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    with graph.inserting_before(node):
        build = Builder(graph, node, made)
        result = build.call(
            float8_linear, bound["input"], bound["weight"], asked.recipe, asked.saved
        )
        if bound.get("bias") is not None:
            result = build.call(torch.add, result, bound["bias"])
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _said(asked: Float8) -> str:
    return f"Float8(recipe={asked.recipe!r})"
