"""What is made without the batch, such as tables of positions, passes whole between layers whose tokens devices
share."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import piper
from piper import Mesh
from piper.api.captures import capturing
from piper.api.reference.verification import verify_strategy
from piper.views.explained.layouts import layouts
from piper_capture.chunks import tables
from piper_compiler import Strategy
from piper_ir.ground.select import where
from tests.helpers import published_llama

TENSOR = piper.shard(where(), over="tp", stream="tokens")
CONTEXT = piper.shard(where(), over="cp", index="tokens")
MESHES: dict[str, tuple[Mesh, list[Any]]] = {
    "tp": (Mesh(tp=2), [TENSOR]),
    "cp": (Mesh(cp=2), [CONTEXT]),
    "both": (Mesh(cp=2, tp=2), [TENSOR, CONTEXT]),
}


@cache
def compiled(mesh: str) -> Any:
    return piper.compile(published_llama.job(), Strategy(*MESHES[mesh]))


def layer(mesh: str) -> Any:
    return next(c for c in compiled(mesh).plan.chunks if c.id == "layer1")


def inside(chunk: Any) -> dict[str, Counter[str]]:
    return {step: Counter(c.kind for c in sig.collectives) for step, sig in chunk.steps.items()}


def shapes(chunk: Any) -> list[tuple[int, ...]]:
    return [tuple(i.spec.shape) for i in chunk.inputs if i.kind == "value"]


@pytest.mark.long
def test_a_layer_gathers_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many messages as with tables of the layer's own; in parts they would be gathered forward and backward."""
    found = layer("tp")
    tokens = Counter(all_gather=2, reduce_scatter=2)
    assert inside(found) == {"F": tokens, "I": tokens, "W": Counter(all_gather=2)}
    assert shapes(found) == [(8, 8, 64), (1, 16, 8), (1, 16, 8), (8, 1, 16, 16)]
    monkeypatch.setattr(
        "piper_capture.store.sharding.constant_values",
        lambda program, joint_of: frozenset(),
    )
    capturing.captured_job(published_llama.job()).shared.clear()
    compiled.cache_clear()
    parts = layer("tp")
    capturing.captured_job(published_llama.job()).shared.clear()
    compiled.cache_clear()
    assert inside(parts)["F"] == inside(parts)["I"] == Counter(all_gather=4, reduce_scatter=2)
    assert shapes(parts)[1:3] == [(1, 8, 8), (1, 8, 8)]


@pytest.mark.long
def test_along_a_context_axis_they_pass_in_the_parts_that_are_used() -> None:
    assert shapes(layer("both"))[1:3] == [(1, 8, 8), (1, 8, 8)]


@pytest.mark.long
def test_explain_tells_both_axes_apart() -> None:
    """Heads that a context axis shares in attention alone are said to be so, and like messages stand in one line."""
    text = layouts(compiled("both"))
    said = " ".join(text[text.index("layer0, layer1") : text.index("root.1")].split())
    assert "tokens 16 shared by 4 (tp, cp)" in said and "heads 2 shared by 2 (tp)" in said
    assert (
        "groups 4 shared in attention by 2 (cp), else whole: heads has a step for each device"
        in said
    )
    assert "tp=2 (weights, tokens), cp=2 (tokens): " in said
    assert re.search(
        r"F all_to_all 3x 8 KiB over cp before attention \(published_llama.py:\d+: ", said
    )
    assert "gradients summed over tp, cp with bucket1: input_layernorm.weight" in said
    first = " ".join(text[: text.index("layer0, layer1")].split())
    assert re.search(
        r"computed whole on each device: 6\d.\d\d% of its FLOPs, 0.0\d% of all: le ", first
    ), "masks are made here"


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh",
    [
        "tp",
        "cp",
        "both",
    ],
)
def test_layers_with_tables_are_one_device(mesh: str) -> None:
    report = verify_strategy(published_llama.job(), Strategy(*MESHES[mesh]), steps=1)
    assert report.equal, report.text()


class Handing(torch.nn.Module):
    """Layers that take what is made before them: of positions, of the batch, of a parameter, of chance and of a
    table."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.scale, self.embed = torch.nn.Parameter(torch.ones(6, 4)), torch.nn.Embedding(9, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])[:, None].float()
        handed = (
            places.cos(),
            (tokens % 2)[..., None].float(),
            self.scale.cos(),
            torch.rand(6, 1),
            places.sin().exp(),
        )
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
            for each in handed:
                x = x * each
        return x


def handing() -> Any:
    def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
        return torch.arange(6 * len(rows)).view(len(rows), 6) % 9, torch.zeros(len(rows), 6, 4)

    def sgd(named: Any) -> Any:
        return torch.optim.SGD([p for _, p in named], lr=0.1)

    return capturing.captured_job(
        piper.Job(Handing, batch, torch.nn.functional.mse_loss, sgd, global_batch=4)
    )


def test_what_depends_on_batch_parameters_or_chance_is_no_constant() -> None:
    made = handing()
    found = tables.constant_values(made.program, lambda chunk: made.code.joint(chunk.code, 2))
    shapes = [tuple(o.spec.shape[1:]) for o in made.program.chunks[0].outputs]
    assert shapes == [(1,), (6, 1), (4,), (1,), (1,), (6, 4)], (
        "positions, batch, parameter, chance, a table, tokens"
    )
    assert found == {"root:out0", "root:out4"}
