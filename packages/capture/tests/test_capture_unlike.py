"""Layers that nearly share a trace: where what is written differs in a keyword, a number's type, or which object is
which, and where the modules that run are not the layer's own, the program is that of a plain trace."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import invoke_subgraph

from packages.capture.tests.alike_layers import layers
from packages.capture.tests.alike_shared import SHARED
from packages.capture.tests.repeated_cases import (
    LAYERS,
    WIDTH,
    Layer,
    Model,
    Part,
    Work,
    captured,
    pieces,
    plainly,
)
from piper_capture import tag
from piper_capture.torch_api import _torch
from piper_capture.trace import repeated
from piper_ir.ground.errors import CaptureError


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "FEWEST", LAYERS)


class Held(Layer):
    """`use`: what it does with its output and what it holds."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], **held: Any) -> None:
        super().__init__()
        self.use = use
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.use(self, super().forward(x, bias))


def held(
    use: Callable[[Any, Tensor], Tensor], of: Callable[[int], dict[str, Any]]
) -> Callable[[], nn.Module]:
    return lambda: Model([Held(use, **of(k)) for k in range(LAYERS)])


def odd(k: int) -> dict[str, Any]:
    return {"odd": k % 2 == 1}


def attention(layer: Any, y: Tensor) -> Tensor:
    heads = y.unflatten(-1, (2, 4)).transpose(0, 1).unsqueeze(0)
    if layer.odd:
        found = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    else:
        found = F.scaled_dot_product_attention(heads, heads, heads)
    return found.squeeze(0).transpose(0, 1).flatten(-2)


def activation(layer: Any, y: Tensor) -> Tensor:
    return F.gelu(y, approximate="tanh") if layer.odd else F.gelu(y)


def bounds(layer: Any, y: Tensor) -> Tensor:
    return torch.clamp(y, min=0.5) if layer.odd else torch.clamp(y, max=0.5)


def left_out(layer: Any, y: Tensor) -> Tensor:
    return y - (y.sum(0) if layer.odd else y.sum(0, True))


def times(layer: Any, y: Tensor) -> Tensor:
    return y * layer.number


def of_integers(layer: Any, y: Tensor) -> Tensor:
    for number in layer.numbers:
        y = (y.to(torch.int64) * number).to(y.dtype) * y
    return y


def one_object(layer: Any, y: Tensor) -> Tensor:
    return y * (2 if layer.a is layer.b else 3)


def one_or_two(make: Callable[[], Any]) -> Callable[[int], dict[str, Any]]:
    def of(k: int) -> dict[str, Any]:
        first = make()
        return {"a": first, "b": first if k % 2 else make()}

    return of


def named_values(layer: Any, y: Tensor) -> Tensor:
    for value in vars(layer.config).values():
        y = y * value
    return y


def or_default(layer: Any, y: Tensor) -> Tensor:
    try:
        return y * layer.config.factor
    except AttributeError:
        return y


def in_order_set(layer: Any, y: Tensor) -> Tensor:
    for name, value in vars(layer).items():
        if name in ("times", "plus"):
            y = y * value if name == "times" else y + value
    return y


def config(**extra: float) -> Callable[[int], dict[str, Any]]:
    return lambda k: {"config": SimpleNamespace(**(extra if k == 2 else {}))}


class Given(Layer):
    def forward(self, x: Tensor, bias: Tensor, number: float = 1.0) -> Tensor:
        return super().forward(x, bias) * number


class GivesZeros(Model):
    def call(self, k: int, layer: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
        return layer(x, bias, 0.0 if k % 2 else -0.0)


class InList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor, bias: Tensor) -> list[Tensor]:
        return [self.part(x) + bias]


class TakesList(Model):
    def call(self, k: int, layer: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
        found = layer(x, bias)
        return found[0] if isinstance(found, list) else found[0] * 2


DIFFER: dict[str, tuple[Callable[[], nn.Module], Work]] = {
    "a keyword of attention": (held(attention, odd), (4, 2, 2)),
    "a keyword of an activation": (held(activation, odd), (4, 2, 2)),
    "the name of a keyword": (held(bounds, odd), (4, 2, 2)),
    "an argument that is left out": (held(left_out, odd), (4, 2, 2)),
    "the sign of zero": (held(times, lambda k: {"number": (0.0, -0.0)[k % 2]}), (4, 2, 2)),
    "the sign of a zero that is given": (lambda: GivesZeros(layers(Given)), (4, 2, 2)),
    "the types of equal numbers": (
        held(of_integers, lambda k: {"numbers": [(1, 1.0)[k % 2]]}),
        (4, 2, 2),
    ),
    "a number and a bool": (
        held(of_integers, lambda k: {"numbers": [(1, True)[k % 2]]}),
        (4, 2, 2),
    ),
    "the types of equal keys": (
        held(of_integers, lambda k: {"numbers": {(1, 1.0)[k % 2]: 0}}),
        (4, 2, 2),
    ),
    "one dict or two": (held(one_object, one_or_two(dict)), (4, 2, 2)),
    "one object or two": (held(one_object, one_or_two(SimpleNamespace)), (4, 2, 2)),
    "one function or two": (held(one_object, one_or_two(lambda: lambda y: y)), (4, 2, 2)),
    "the attributes of an object": (held(named_values, config(factor=2.0)), (3, 1, 2)),
    "an attribute that is not there": (held(or_default, config(factor=2.0)), (3, 1, 2)),
    "the order of attributes": (
        held(
            in_order_set,
            lambda k: dict.fromkeys(("times", "plus") if k % 2 else ("plus", "times"), 2.0),
        ),
        (4, 2, 2),
    ),
    "nothing, but give a list": (lambda: TakesList(layers(InList)), (0, 0, 0)),
}
"""What layers differ in: model, and how much of it is traced once. Calls of a trace that serves no other one are
Dynamo's to replace."""


class Chooses(Layer):
    def __init__(self, other: bool) -> None:
        super().__init__()
        self.a, self.b, self.other = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), other

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        y = super().forward(x, bias)
        found: Tensor = self.b(y) if self.other else self.a(y)
        return found


def chosen() -> nn.Module:
    return tag(
        Model(layers(Chooses, lambda k: (k % 2 == 1,))),
        {"layers.*.a": {"half": 0}, "layers.*.b": {"half": 1}},
    )


class Borrows(Layer):
    """Runs a module that is not its own."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.borrowed = [part]

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        found: Tensor = self.borrowed[0](super().forward(x, bias))
        return found


def borrowed(number: int) -> nn.Module:
    model = Model([])
    model.parts = nn.ModuleList([Part() for _ in range(number)])
    model.layers = nn.ModuleList([Borrows(model.parts[k % number]) for k in range(LAYERS)])
    return tag(model, {f"parts.{k}": {"half": k} for k in range(number)})


class Takes(Layer):
    def forward(self, x: Tensor, bias: Tensor, part: nn.Module) -> Tensor:
        found: Tensor = part(super().forward(x, bias))
        return found


class Gives(Model):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(layers)
        self.parts = nn.ModuleList([Part() for _ in layers])

    def call(self, k: int, layer: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
        return layer(x, bias, self.parts[k])


class CallsForward(Model):
    """A layer's own forward, past what a call of a module does."""

    def call(self, k: int, layer: Any, x: Tensor, bias: Tensor) -> Tensor:
        return layer.forward(x, bias)


def each(model: nn.Module, pattern: str) -> nn.Module:
    return tag(model, {pattern.format(k): {"half": k} for k in range(LAYERS)})


MODULES: dict[str, tuple[Callable[[], nn.Module], Work]] = {
    "one of two": (chosen, (4, 2, 2)),
    "one for all": (lambda: borrowed(1), (4, 1, 3)),
    "one for each": (lambda: borrowed(LAYERS), (4, 1, 3)),
    "one that is given": (lambda: each(Gives(layers(Takes)), "parts.{}"), (4, 1, 3)),
    "those of a forward": (lambda: each(CallsForward(layers()), "layers.{}.part"), (4, 1, 3)),
}
"""Which tagged module runs in a layer."""


class ReadsFirst(Model):
    """`read`: of every layer, before the first is called."""

    def __init__(self, read: Callable[[Any], float], layers: list[nn.Module]) -> None:
        super().__init__(layers)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        read = sum(self.read(layer) for layer in self.layers)
        return super().forward(x) * read


class Ends(Layer):
    def __init__(self, end: nn.Module) -> None:
        super().__init__()
        self.end = end

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        found: Tensor = self.end(super().forward(x, bias))
        return found


def hooked() -> nn.Module:
    made = layers(Ends, lambda k: (nn.Identity(),))
    made[2].end.register_forward_hook(lambda module, inputs, output: output * 2)
    return ReadsFirst(lambda layer: layer.end.training, made)


def in_container() -> nn.Module:
    made = [
        Held(lambda layer, y: y * layer.numbers["a"][0], numbers={"a": [1.5 + k % 2]})
        for k in range(LAYERS)
    ]
    return ReadsFirst(lambda layer: layer.numbers["a"][0], list(made))


READ: dict[str, tuple[Callable[[], nn.Module], Work]] = {
    "a part with a hook": (hooked, (3, 1, 2)),
    "a number in a container": (in_container, (4, 2, 2)),
}
"""What the model reads before."""

CASES = {
    f"{title}: {name}": case
    for title, cases in (
        ("differ", DIFFER),
        ("modules", MODULES),
        ("read", READ),
        ("shared", SHARED),
    )
    for name, case in cases.items()
}


@pytest.mark.sampled(28)
@pytest.mark.parametrize("name", CASES)
def test_the_program_is_that_of_a_plain_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = CASES[name]
    found, work = captured(model, monkeypatch, pieces)
    assert (work, found == plainly(model, monkeypatch, pieces)) == (expected, True)


@pytest.mark.long
def test_threads_leave_classes_as_they_were() -> None:
    """Also those through which it is seen what a call changes, from before a trace to after it."""

    def found() -> tuple[Any, ...]:
        return (
            Layer.forward,
            invoke_subgraph.find_reuse_match,
            SideEffects.store_attr,
            SideEffects.mutation,
        )

    before = found()
    for _ in range(3):
        threads = [Thread(target=pieces, args=(lambda: Model(layers()),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found() == before


class Regional(Part):
    """A part that its author made a nested region; `odd` is an attribute that Dynamo's own reuse of traces sees."""

    def __init__(self, odd: bool) -> None:
        super().__init__()
        self.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        return self.within(x)

    def within(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.clamp(min=0.5) if self.odd else y.clamp(max=0.5)


class Own(Regional):
    @torch.compiler.nested_compile_region
    def within(self, x: Tensor) -> Tensor:
        return super().within(x)


class Outer(Own):
    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", [Own, Outer], ids=["a region", "a region in a region"])
@pytest.mark.parametrize(
    "fewest", [LAYERS, 2 * LAYERS], ids=["in a repeated layer", "in a layer of few"]
)
def test_regions_of_the_users_own(
    kind: type[Regional], fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model(part: type[Regional]) -> Callable[[], nn.Module]:
        def made() -> nn.Module:
            found = Model(layers())
            for k, layer in enumerate(found.layers):
                layer.part = part(k % 2 == 1)
            return found

        return made

    monkeypatch.setattr(repeated, "FEWEST", fewest)
    assert pieces(model(kind)) == plainly(model(Regional), monkeypatch, pieces)


def test_regions_of_the_users_own_that_torch_would_merge_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is left where a torch has other names for what `regions_apart` patches."""
    monkeypatch.setattr(_torch, "regions_apart", nullcontext)
    made = [Layer() for _ in range(LAYERS - 1)]
    for layer in made:
        layer.part = Own(odd=False)
    with pytest.raises(
        CaptureError, match=r"cannot be captured: .*; remove torch.compiler.nested_compile_region"
    ):
        pieces(lambda: Model(made))
