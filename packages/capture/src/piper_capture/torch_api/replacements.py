"""Replace the forward of tagged modules by registered functions while a model is captured.

    @piper.replacement("my_experts")
    def forward(module, x, chosen, share): ...

    piper.tag(model, {"model.layers.*.mlp.experts": dict(experts=0, replace="my_experts")})

The function gets the module and the arguments of its forward, and must return the same values: `piper verify` compares
a plan with the model without replacements. Only the captured copy is changed, not the user's model or its file.

`gated_experts` replaces the experts of Hugging Face's mixtures (Mixtral, Qwen3-MoE and their like), which loop over the
chosen experts, or sort tokens and call grouped kernels of one device. It needs modules of the same form: the matrices
`gate_up_proj` and `down_proj` of all experts, perhaps with biases (GPT-OSS), an activation `act_fn` or a method
`_apply_gate`, and the arguments tokens, choices and shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

from torch import Tensor, nn

from piper_ir.ground.errors import SelectorError
from piper_ops import grouped_add, grouped_mm, route, unroute

REPLACE = "replace"
"""The key of `tag` that names a replacement."""
ATTRIBUTE = "_piper_replacement"
"""The attribute of a tagged module that holds (name, pattern)."""
WAY_OUT = (
    "A loop over the experts that tokens chose, or over each expert's tokens, has sizes that only a run knows. "
    "Experts in Hugging Face's form become static by the tag replace='gated_experts', in the function that makes "
    "the model: piper.tag(model, {'*.experts': dict(replace='gated_experts')}); others by a function of your own, "
    "registered with @piper.replacement('name'), that calls route, grouped_mm and unroute of piper_ops."
)
"""The way out for code with sizes that depend on the number of tokens of an expert."""

Replacement = Callable[..., Any]
Misfit = Callable[[nn.Module], str]
_Function = TypeVar("_Function", bound=Replacement)
_KNOWN: dict[str, tuple[Replacement, Misfit]] = {}


def _fits_all(module: nn.Module) -> str:
    return ""


def replacement(name: str, *, check: Misfit = _fits_all) -> Callable[[_Function], _Function]:
    """Register a function under a name, so that `tag` can replace the forward of modules by it.

    Args:
        name: the name; a function registered earlier under this name is forgotten.
        check: returns the reason why the function cannot replace a module's forward; "" if it can.
    """
    if not isinstance(name, str) or not name:
        raise SelectorError(f"replacement({name!r}): a name is needed, such as 'my_experts'")

    def register(function: _Function) -> _Function:
        _KNOWN[name] = function, check
        return function

    return register


def own_replacements() -> tuple[tuple[str, Replacement], ...]:
    """Return the registered functions in the order of their names."""
    return tuple(
        (name, function) for name, (function, _) in sorted(_KNOWN.items(), key=lambda item: item[0])
    )


def mark(name: str, module: nn.Module, pattern: str, wanted: object) -> None:
    """Note on a module which replacement its forward gets; raise SelectorError if it cannot be replaced by it."""
    entry = _KNOWN.get(wanted) if isinstance(wanted, str) else None
    if entry is None or not isinstance(wanted, str):
        known = ", ".join(repr(n) for n, _ in own_replacements())
        raise SelectorError(
            f"tag {pattern!r}: there is no replacement {wanted!r}; known are {known}. Register a function with "
            f"@piper.replacement({wanted!r})"
        )
    reason = entry[1](module)
    if reason:
        raise SelectorError(
            f"tag {pattern!r}: {wanted!r} cannot stand in the place of module {name!r} ({type(module).__name__}): "
            f"{reason}. Register a function that can with @piper.replacement('name')"
        )
    before, by = module.__dict__.setdefault(ATTRIBUTE, (wanted, pattern))
    if before != wanted:
        raise SelectorError(
            f"tag: patterns {by!r} and {pattern!r} disagree for module {name!r}: replace={before!r} and "
            f"replace={wanted!r}; make them match different modules"
        )


def replaced_experts(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the modules of a model that "gated_experts" replaces, with the numbers of their experts."""
    for name, module in model.named_modules():
        if module.__dict__.get(ATTRIBUTE, ("",))[0] == "gated_experts":
            matrices: Any = module.down_proj
            yield name, int(matrices.shape[0])


def replace_tagged(model: nn.Module) -> None:
    """Replace the forward of tagged modules; `model` is the private copy of the capture."""
    for module in model.modules():
        if ATTRIBUTE in module.__dict__:
            kind: Any = type(module)
            module.__class__ = _with_forward(kind, _KNOWN[module.__dict__[ATTRIBUTE][0]][0])


@cache
def _with_forward(kind: Any, function: Replacement) -> Any:
    """Return a subclass with another forward, one for each class and function, so that equal layers stay equal."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _not_gated(module: Any) -> str:
    """Return why a module is not of the form that `gated_experts` computes."""
    weights = [
        w
        for name in ("gate_up_proj", "down_proj")
        if isinstance(w := getattr(module, name, None), Tensor)
    ]
    gates = any(callable(getattr(module, name, None)) for name in ("act_fn", "_apply_gate"))
    if [w.dim() for w in weights] != [3, 3] or not gates:
        return "it has no gate_up_proj and down_proj of three dimensions, with an activation act_fn"
    told = {
        "has_post_expert_norm": "it has a norm after each expert",
        "_is_expert_parallel": "transformers has cut its experts",
    }
    reasons = [text for name, text in told.items() if getattr(module, name, False)]
    reasons += [] if getattr(module, "has_gate", True) else ["its experts have no gate"]
    wide, narrow = (_as_columns(module, w) for w in weights)
    if (
        wide.shape[0] != narrow.shape[0]
        or wide.shape[2] != 2 * narrow.shape[1]
        or wide.shape[1] != narrow.shape[2]
    ):
        reasons.append(
            f"gate_up_proj {tuple(weights[0].shape)} and down_proj {tuple(weights[1].shape)} do not fit together"
        )
    biases = [_bias_of(module, name) for name in ("gate_up_proj", "down_proj")]
    shapes = [(w.shape[0], w.shape[2]) for w in (wide, narrow)]
    if not all(b is None or tuple(b.shape) == s for b, s in zip(biases, shapes, strict=True)):
        reasons.append("its biases are not [experts, outputs]")
    return " and ".join(reasons)


def _bias_of(module: Any, name: str) -> Tensor | None:
    """Return the biases [experts, outputs] of a product, or None."""
    bias = getattr(module, f"{name}_bias", None)
    return bias if isinstance(bias, Tensor) else None


def _as_columns(module: Any, weight: Tensor) -> Tensor:
    """Return the weight as matrices [experts, inputs, outputs]."""
    return weight if getattr(module, "is_transposed", False) else weight.transpose(1, 2)


@replacement("gated_experts", check=_not_gated)
def gated_experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute gated experts for tokens [N, W] with static ops, given each token's experts and shares [N, k]."""
    wide, narrow = (_as_columns(module, w) for w in (module.gate_up_proj, module.down_proj))
    rows, counts = route(hidden_states, top_k_index, wide.shape[0])

    def product(x: Tensor, weight: Tensor, name: str) -> Tensor:
        made: Tensor = grouped_mm(x, counts, weight)
        bias = _bias_of(module, name)
        return made if bias is None else grouped_add(made, counts, bias)

    both = product(rows, wide, "gate_up_proj")
    if hasattr(module, "_apply_gate"):
        hidden = module._apply_gate(both)
    else:
        gate, up = both.chunk(2, dim=-1)
        hidden = module.act_fn(gate) * up
    output: Tensor = unroute(product(hidden, narrow, "down_proj"), top_k_index, top_k_weights)
    return output
