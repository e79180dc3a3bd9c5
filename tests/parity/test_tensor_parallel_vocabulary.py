"""Devices that have parts of a vocabulary, its embedding, output head and loss, train what one device trains."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper import Mesh, recipes
from piper.api.captures import capturing
from piper_compiler import Strategy, capture_request
from piper_ir.program.layout import DimPart
from piper_runtime.rank.job.job import Job
from tests.helpers import models, parity, shared_jobs, small_transformers
from tests.helpers.compositions import adamw
from tests.helpers.memory_judge import lies

STREAMS = ("", "tokens")
ODD = 33
MESHES: dict[str, tuple[dict[str, int], list[Any]]] = {
    "tp": ({}, []),
    "dp": ({"dp": 2}, [recipes.data_parallel()]),
    "zero3": ({"dp": 2}, [recipes.data_parallel(zero=3)]),
}


def written_out(logits: Tensor, targets: Tensor) -> Tensor:
    """A loss that no single op stands for: it wants all classes."""
    chosen = torch.log_softmax(logits, -1).gather(-1, targets.unsqueeze(-1))
    return -chosen.mean()


class Pooled(nn.Module):
    """The norm of each layer is also that of the head, which sees the mean of a row's tokens only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(small_transformers.GPTBlock() for _ in range(1))
        self.norm, self.head = nn.LayerNorm(models.D), nn.Linear(models.D, models.D)
        for layer in self.layers:
            layer.norm2 = self.norm

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.mean(1)))


def of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.mean(1)).square().mean()


@dataclass(frozen=True)
class Made:
    """A model that only this file trains."""

    model: Callable[[], nn.Module]
    batch: Any
    loss: Any


CASES = {
    "odd": Made(
        functools.partial(models.TinyGPT, layers=1, vocab=ODD),
        models.token_batch,
        models.cross_entropy,
    ),
    "written_out": Made(
        functools.partial(models.TinyGPT, layers=1), models.token_batch, written_out
    ),
    "pooled": Made(Pooled, models.feature_batch, of_tokens),
}


@functools.cache
def job(name: str) -> Job:
    case = CASES[name]
    return Job(
        case.model, case.batch, case.loss, adamw, global_batch=4, clip_norm=0.5, seed=3,
        precision=piper.Precision(params="float64"),
    )  # fmt: skip


def strategy(stream: str) -> Strategy:
    return Strategy(Mesh(tp=2), [piper.shard(piper.where(), stream=stream)])


def trained(name: str, stream: str) -> Any:
    """A compiled job that was run and judged."""
    made = piper.compile(job(name), strategy(stream))
    found = shared_jobs.run(made)
    parity.assert_parity(found, parity.reference(job(name), replicas=1, microbatches=1))
    assert not lies(made.plan, found.memory)
    return made


def unshared(name: str, stream: str) -> dict[str, str]:
    """What stays whole in a job, with why."""
    traced = capturing.traced_job(job(name))
    asked = capture_request(Mesh(tp=2), strategy(stream).directives, traced.outline)
    return dict(capturing.rewritten(traced, asked).unshared)


def layouts(made: Any) -> dict[str, Any]:
    return {p.name: p.layout for p in made.plan.params}


def counted(made: Any, chunk: int) -> dict[str, Counter[str]]:
    """The collectives of a chunk's steps, by step."""
    steps = made.plan.chunks[chunk].steps.items()
    return {step: Counter(c.kind for c in sig.collectives) for step, sig in steps}


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "name", ["gpt", pytest.param("gpt_untied", marks=LONG), pytest.param("llama", marks=LONG)]
)
def test_tables_and_heads_lie_in_parts_of_the_vocabulary(name: str) -> None:
    found = layouts(shared_jobs.compiled(name, Mesh(tp=2), [], stream="tokens"))
    tables = [p for p in found if p.split(".")[0] in ("tokens", "embed", "head")]
    assert tables and all(found[p] == (DimPart("tp", 0),) for p in tables)


@pytest.mark.parametrize("name", ["gpt", pytest.param("llama", marks=LONG)])
def test_what_the_vocabulary_sends(name: str) -> None:
    """The embedding's sum settles into tokens; the head gathers these once, and its gradient settles into them. The
    loss gathers two numbers per token; the table's gradient needs the tokens of what comes back."""
    made = shared_jobs.compiled(name, Mesh(tp=2), [], stream="tokens")
    assert counted(made, 0) == {
        "F": Counter(reduce_scatter=1),
        "I": Counter(),
        "W": Counter(all_gather=1),
    }
    assert counted(made, -1) == {
        "F": Counter(all_gather=2),
        "I": Counter(reduce_scatter=1),
        "W": Counter(all_gather=1),
    }
    sent = [c for c in made.plan.chunks[-1].steps["F"].collectives if c.kind == "all_gather"]
    tokens = made.plan.rows * 8
    assert sorted(c.nbytes for c in sent) == [2 * 2 * tokens * 8, tokens * 32 * 8]
    whole = shared_jobs.compiled(name, Mesh(tp=2), [])
    assert counted(whole, 0) == {"F": Counter(all_reduce=1), "I": Counter(), "W": Counter()}
    assert counted(whole, -1) == {
        "F": Counter(all_gather=1),
        "I": Counter(all_reduce=1),
        "W": Counter(),
    }


@LONG
@pytest.mark.parametrize("stream", STREAMS)
def test_a_vocabulary_that_does_not_divide_stays_whole(stream: str) -> None:
    assert layouts(trained("odd", stream))["embed.weight"] == ()
    assert unshared("odd", stream)["embed.weight:0"] == "2 devices cannot share 33 evenly; 3 can"


@pytest.mark.long
@pytest.mark.parametrize("stream", [pytest.param("", marks=LONG), "tokens"])
def test_a_tied_table_stays_whole_where_the_head_must_have_it_whole(stream: str) -> None:
    found = layouts(trained("written_out", stream))
    assert found["embed.weight"] == ()
    assert found["position.weight"] == (DimPart("tp", 0),), "nothing else is whole for it"
    assert unshared("written_out", stream) == {
        "embed.weight": "not all chunks that have it can share it alike: root, root.1"
    }


def test_a_tied_parameter_whose_gradient_is_a_sum_in_one_chunk_is_one_in_all() -> None:
    """The layer's norm sees the tokens of one device, the head's the mean of all."""
    summed = {p.name: p.summed for p in trained("pooled", "tokens").plan.params}
    assert summed["layers.0.norm2.weight"] == ("tp",)
    assert "norm.weight" not in summed, "it is the same parameter"


@LONG
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["gpt", "gpt_untied", "llama", "keywords"])
def test_trainings_are_those_of_one_device(name: str, mesh: str, tp: int, stream: str) -> None:
    axes, directives = MESHES[mesh]
    made = shared_jobs.compiled(name, Mesh(tp=tp, **axes), directives, stream=stream)
    found = shared_jobs.run(made)
    shared_jobs.assert_equal(name, made, found)
    assert not lies(made.plan, found.memory)
