"""Protect that a loss in tiles of tokens trains what one device trains, in less memory, or is refused by condition."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import piper
from piper import DirectiveError, Mesh, Strategy, models, recipes, tile_loss
from piper.api.captures.capturing import captured_job, rewritten, traced_job
from piper.api.reference.verification import verify_strategy
from piper.models.jobs import adamw, cross_entropy
from piper.views.explained.explain import explain
from piper_capture import restored, stored, with_tiles
from piper_capture.store import tiled_loss
from piper_compiler import CaptureRequest
from piper_ir.tools import size_text
from tests.helpers.compositions import Composition
from tests.helpers.decoders import DECODERS
from tests.helpers.judged import judge

CASES = (
    Composition("gpt", 2, 2, 4, "1f1b", optimizer="adamw", clip=0.05, zero=3, bucket_mb=0.002, tiles=4),
    Composition("gpt_untied", 2, 1, 4, "zb_h1", tiles=2, keep="inputs"),
    Composition("gpt", 1, 2, 2, precision="mixed", tiles=4),
    Composition("llama", microbatches=2, tp=2, stream="tokens", tiles=4),
    Composition("llama", dp=2, cp=2, attention="ring", tiles=2),
)  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiles_train_what_one_device_trains_in_the_memory_of_the_plan(case: Composition) -> None:
    judge(case)


def half(logits: Tensor, targets: Tensor) -> Tensor:
    """Half of the mean: a loss whose own gradient is not 1 where its cross-entropy stands."""
    return 0.5 * cross_entropy(logits, targets)


def job(name: str = "Mistral", loss: Any = half) -> piper.Job:
    return replace(models.job(DECODERS[name], global_batch=4, precision="float64"), loss=loss)


STRATEGY = Strategy(Mesh(), (tile_loss(4), piper.split(piper.where(), microbatches=2)))


@pytest.mark.parametrize("name", ["Mistral", "Phi"])
def test_capped_logits_and_a_bias_are_tiled_with_the_loss(name: str) -> None:
    assert verify_strategy(job(name), STRATEGY, steps=2).equal
    text = explain(piper.compile(job(name), STRATEGY))
    saved = (2 * 8 * 16 + 32 * 16 + 2 * 8) * 8 + (32 + 2 * 8) * 8 * (name == "Phi")
    assert f"one tile at a time, and their gradients; {size_text(saved)} wait" in text, text
    assert "W is empty" not in text


def test_gradients_without_the_scale_of_the_loss_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the backward leaves out the gradient that it gets."""
    monkeypatch.setattr(tiled_loss._Tiles, "_scaled", lambda self, node, region: self._unit[node])
    sizes = replace(DECODERS["Mistral"], vocab=30)
    changed = replace(models.job(sizes, global_batch=4, precision="float64"), loss=half)
    assert not verify_strategy(changed, STRATEGY, steps=1).equal


def test_the_logits_of_one_tile_are_alive_at_once() -> None:
    sizes = replace(DECODERS["Llama"], vocab=4096, length=64)
    captured = captured_job(models.job(sizes, global_batch=4, precision="float64"))
    logits = 2 * 64 * 4096 * 8
    whole, tiles = (with_tiles(captured, n).bind(2).chunks[-1] for n in (1, 16))
    assert max(max(s) for s in whole.steps["F"].liveness.segments) >= logits
    peak = max(max(s) for s in tiles.steps["F"].liveness.segments)
    gradient = 4096 * 16 * 8
    assert peak < 2 * gradient + 3 * logits // 16
    sent = {p: prod(tiles.ports[p].shape) * 8 for p in tiles.steps["F"].writes}
    assert max(sent.values()) == gradient and sum(size == gradient for size in sent.values()) == 1
    flops = [sum(s.cost.flops for s in c.steps.values()) for c in (whole, tiles)]
    assert flops[1] == pytest.approx(flops[0], rel=0.03)


def test_a_kept_capture_has_its_tiles() -> None:
    request = CaptureRequest(tiles=4)
    traced = traced_job(job("Qwen2"))
    program = rewritten(traced, request).program
    kept = pickle.loads(pickle.dumps(stored(traced)))

    def never() -> Any:
        raise AssertionError("the model is captured again")

    assert rewritten(restored(kept, never), request).program == program


class Head(nn.Module):
    """A linear layer, with the logits or their mean as results."""

    def __init__(self, returns: str = "logits") -> None:
        super().__init__()
        self.head, self.returns = nn.Linear(8, 16), returns

    def forward(self, x: Tensor) -> Any:
        logits = self.head(x)
        return (logits, logits.square().mean()) if self.returns == "both" else logits


def features(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = torch.ones(len(rows), 6, 8)
    return x, torch.zeros(len(rows), 6, dtype=torch.int64)


def per_token(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").mean()


def with_square(output: Any, targets: Tensor) -> Tensor:
    return cross_entropy(output[0], targets) + output[1]


def of_norms(logits: Tensor, targets: Tensor) -> Tensor:
    normed = F.layer_norm(logits, (16,))
    return cross_entropy(normed, targets)


def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.argmax(-1) == targets).double().mean()


@pytest.mark.parametrize(
    ("condition", "says", "tiles", "returns", "loss"),
    [
        (1, "tiles=0; the number of tiles", (0,), "logits", cross_entropy),
        (2, "the loss is in tiles already", (2, 3), "logits", cross_entropy),
        (3, "has no cross-entropy", (2,), "logits", lambda x, t: x.square().mean()),
        (3, "reduction 'none'", (2,), "logits", per_token),
        (3, "the gradient of the logits is used by aten.add", (2,), "both", with_square),
        (3, "used beside the loss", (2,), "metric", cross_entropy),
        (3, "between the last linear layer and the loss stands piper.layer_norm", (2,), "logits", of_norms),
        (4, "6 tokens of a row do not divide into 4 tiles", (4,), "logits", cross_entropy),
    ],
)  # fmt: skip
def test_each_condition_has_its_message(
    condition: int, says: str, tiles: tuple[int, ...], returns: str, loss: Any
) -> None:
    metrics: Any = {"accuracy": accuracy} if returns == "metric" else {}
    optimizer = partial(adamw, lr=1e-3)
    made = piper.Job(
        lambda: Head(returns), features, loss, optimizer, global_batch=4, metrics=metrics
    )
    with pytest.raises(DirectiveError, match=rf"{says}.*\[tile_loss condition {condition}\]"):
        piper.compile(made, Strategy(Mesh(), tuple(tile_loss(n) for n in tiles)))


def test_a_synthetic_program_has_no_loss() -> None:
    with pytest.raises(DirectiveError, match=r"no captured model.*\[tile_loss condition 3\]"):
        piper.compile(
            piper.synthetic(stages=2, F=1, I=1, W=1),
            Strategy(Mesh(pp=2), (tile_loss(2), *recipes.gpipe(pp=2, microbatches=2))),
        )
