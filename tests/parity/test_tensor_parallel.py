"""Protect what is special to devices that share the work of chunks: few heads, layouts, collectives, checkpoints.

And what is refused. That such plans train what one device trains is checked in test_compositions.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper import Mesh, recipes
from piper.api.reference.verification import verify_strategy
from piper.models.jobs import random_tokens
from piper_compiler import Strategy
from piper_ir.ground.errors import DirectiveError, PlanError
from piper_ir.ground.select import where
from piper_ir.program.layout import DimPart
from piper_ir.verify import verify
from piper_runtime import Checkpoints
from tests.helpers import parity, shared_jobs
from tests.helpers.cases import each_case
from tests.helpers.memory_judge import lies


@pytest.mark.long
@pytest.mark.parametrize(
    ("tp", "stream"),
    [
        (8, "tokens"),
        *(pytest.param(*way, marks=pytest.mark.long) for way in ((4, ""), (4, "tokens"), (8, ""))),
    ],
)
def test_fewer_heads_of_keys_than_devices(tp: int, stream: str) -> None:
    """Two heads of keys on eight devices: four devices share each, with the groups of its queries."""
    made = shared_jobs.in_twos("few_kv_heads", Mesh(tp=tp), [piper.shard(where(), stream=stream)])
    found = shared_jobs.run(made)
    shared_jobs.assert_equal("few_kv_heads", made, found)
    assert not lies(made.plan, found.memory)
    assert [n for _, n in made.program.axes] == [2, tp // 2]


def counted(made: Any) -> dict[str, Counter[str]]:
    """The collectives of a layer's steps, by step."""
    chunk = next(c for c in made.plan.chunks if c.id == "layer1")
    return {step: Counter(c.kind for c in sig.collectives) for step, sig in chunk.steps.items()}


def test_a_layer_has_the_collectives_of_megatron() -> None:
    """Shoeybi et al. (arXiv 1909.08053): two all-reduces in forward and in backward. With sequence parallelism each is
    a gather and a reduce-scatter (Korthikanti et al., arXiv 2205.05198), and what W reads is gathered again or kept."""
    whole = counted(shared_jobs.compiled("llama", Mesh(tp=2), []))
    assert whole == {"F": Counter(all_reduce=2), "I": Counter(all_reduce=2), "W": Counter()}
    tokens = counted(shared_jobs.compiled("llama", Mesh(tp=2), [], stream="tokens"))
    both = Counter(all_gather=2, reduce_scatter=2)
    assert tokens == {"F": both, "I": both, "W": Counter(all_gather=2)}
    kept = counted(shared_jobs.compiled("llama", Mesh(tp=2), [], stream="tokens", keep=True))
    assert kept == {"F": both, "I": both, "W": Counter()}


@pytest.mark.long
def test_fused_weights_lie_as_their_parts_do() -> None:
    """The heads of queries, keys and values are each in one third of the rows."""
    made = shared_jobs.compiled("gpt", Mesh(tp=2), [])
    layouts = {p.name: p.layout for p in made.plan.params}
    assert layouts["layers.0.attention.qkv.weight"] == (DimPart("tp", 0, outer=3),)
    assert layouts["layers.0.attention.out.weight"] == (DimPart("tp", 1),)
    assert layouts["layers.0.norm1.weight"] == ()


def broken(made: Any, **changes: Any) -> Any:
    """The same with other facts of one parameter in its plan and program."""
    params = tuple(
        replace(p, **changes) if p.name == "layers.0.attention.qkv.weight" else p
        for p in made.plan.params
    )
    program = replace(made.program, params=params)
    return replace(
        made, program=program, plan=replace(made.plan, params=params, program_key=program.key)
    )


def test_a_wrong_layout_is_seen() -> None:
    """Without the outer factor the first device would have queries and half of the keys."""
    made = broken(shared_jobs.compiled("gpt", Mesh(tp=2), []), layout=(DimPart("tp", 0),))
    found = shared_jobs.run(made)
    wrong = parity.differences(parity.RunOutcome.of(found), shared_jobs.expected("gpt", 1, 1))
    assert any("qkv" in d.name for d in wrong)


def test_a_sum_that_nobody_adds_is_refused() -> None:
    """The gradients of norms are terms of a sum where tokens are shared."""
    made = shared_jobs.compiled("gpt", Mesh(tp=2), [], stream="tokens")
    buckets = tuple(replace(b, over=(), channel="") if b.over else b for b in made.plan.buckets)
    with pytest.raises(PlanError, match="make terms of its gradients, and it does not add them"):
        verify(replace(made.plan, buckets=buckets))


@each_case(
    ("directives", "message"),
    [
        (
            [piper.split(where(), microbatches=2), piper.shard(where())],
            "another directive stands before it",
        ),
        ([piper.shard(where(), over="xp")], "over='xp'"),
        (
            [piper.shard(where(), stream="columns")],
            'stream=\'columns\'; "", "tokens" or "rows" is accepted',
        ),
    ],
)
def test_what_is_not_legal_is_said(directives: list[Any], message: str) -> None:
    with pytest.raises(DirectiveError, match=message):
        piper.compile(shared_jobs.job("llama"), Strategy(Mesh(tp=2), directives))


def test_tokens_that_do_not_divide_are_named() -> None:
    with pytest.raises(
        DirectiveError, match=r"shard: 8 tokens cannot be shared by 3 devices \(tp=3\); 2 can"
    ):
        shared_jobs.compiled("llama", Mesh(tp=3), [], stream="tokens")


class Positions(nn.Module):
    """The model is one chunk without layers, and a parameter (the positions) has the tokens as a dimension, too."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(9, 6), nn.Parameter(torch.randn(8, 6))
        self.head = nn.Linear(6, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head((self.tokens(tokens) + self.places).tanh())
        return scores


class Masked(nn.Module):
    """Two layers read a mask that the model makes of constants, in a chunk without inputs: all else is in layers."""

    def __init__(self) -> None:
        super().__init__()
        attention = (nn.MultiheadAttention(6, 2, batch_first=True) for _ in range(2))
        self.layers = nn.ModuleList([nn.Embedding(9, 6), *attention, nn.Linear(6, 9)])

    def forward(self, tokens: Tensor) -> Tensor:
        embed, *layers, head = self.layers
        mask = torch.full((8, 8), -torch.inf, dtype=head.weight.dtype).triu(1)
        hidden = embed(tokens)
        for layer in layers:
            hidden = hidden + layer(hidden, hidden, hidden, attn_mask=mask, need_weights=False)[0]
        scores: Tensor = head(hidden)
        return scores


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        (Positions, Strategy(Mesh(tp=4), recipes.tensor_parallel(sequence=True))),
        (Masked, Strategy(Mesh(tp=2), recipes.tensor_parallel())),
        (Masked, Strategy(Mesh(cp=2), [piper.shard(where(), over="cp", index="tokens")])),
    ],
    ids=["positions", "mask, tp", "mask, cp"],
)
def test_tensors_of_tokens_without_rows_are_shared(
    model: type[nn.Module], strategy: Strategy
) -> None:
    def sgd(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=0.1)

    def loss(scores: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())

    job = piper.Job(model, partial(random_tokens, 9, 8), loss, sgd, global_batch=2)
    assert verify_strategy(job, strategy, steps=2).equal


class Featured(nn.Module):
    """Each row has three features of its own beside its eight tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.of_row = nn.Embedding(9, 6), nn.Linear(3, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 9)

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.of_row(features)[:, None]
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        scores: Tensor = self.head(hidden)
        return scores


@each_case(
    ("mesh", "directive"),
    [
        (Mesh(tp=2), piper.shard(where(), stream="tokens")),
        (Mesh(cp=2), piper.shard(where(), over="cp", index="tokens", order="zigzag")),
    ],
)
def test_features_of_a_row_that_do_not_divide_are_no_tokens(mesh: Mesh, directive: Any) -> None:
    def batch(step: int, rows: range) -> Any:
        tokens, targets = random_tokens(9, 8, step, rows)
        return (tokens, tokens[:, :3] / 9.0), targets

    def sgd(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=0.1)

    def loss(scores: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())

    job = piper.Job(Featured, batch, loss, sgd, global_batch=2)
    assert verify_strategy(job, Strategy(mesh, [directive]), steps=2).equal


class Patches(nn.Module):
    """Its tokens are patches of a picture."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, 6, 2, 2)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, pictures: Tensor) -> Tensor:
        hidden = self.patches(pictures).flatten(2).transpose(1, 2)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        return hidden.mean(1)


@pytest.mark.parametrize("channels", [3, pytest.param(4, marks=pytest.mark.long)])
@each_case(
    ("mesh", "directive"),
    [
        (Mesh(tp=2), piper.shard(where(), stream="tokens")),
        (Mesh(cp=2), piper.shard(where(), over="cp", index="tokens")),
    ],
)
def test_channels_of_a_picture_are_no_tokens(channels: int, mesh: Mesh, directive: Any) -> None:
    def batch(step: int, rows: range) -> Any:
        pictures = torch.randn(4, channels, 4, 8, generator=torch.Generator().manual_seed(step))
        return pictures[rows.start : rows.stop], torch.ones(len(rows), 6)

    def sgd(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=0.1)

    loss = nn.functional.mse_loss
    job = piper.Job(partial(Patches, channels), batch, loss, sgd, global_batch=4)
    found = verify_strategy(job, Strategy(mesh, [directive]), steps=2)
    assert found.equal
    made = piper.compile(job, Strategy(mesh, [directive]))
    shapes = {v.spec.shape for v in made.plan.values.values() if v.id.startswith("inputs@")}
    assert shapes == {(4, channels, 4, 8)}


@pytest.mark.long
def test_an_opaque_region_is_computed_whole() -> None:
    """With shared tokens it would lack some of them, and says so."""
    made = shared_jobs.in_twos("opaque", Mesh(tp=2), [piper.shard(where())])
    shared_jobs.assert_equal("opaque", made, shared_jobs.run(made))
    with pytest.raises(
        DirectiveError, match="'layer0_opaque1' has an opaque region, which needs all tokens"
    ):
        shared_jobs.compiled("opaque", Mesh(tp=2), [], stream="tokens")


def test_a_program_without_code_is_refused() -> None:
    program = piper.synthetic(stages=2, F=1.0, I=1.0, W=1.0)
    with pytest.raises(DirectiveError, match="the program has no code that could be rewritten"):
        piper.compile(program, Strategy(Mesh(tp=2), [piper.shard(where())]))


SAVED: dict[str, tuple[Mesh, list[Any], str]] = {
    "one device": (Mesh(), [], ""),
    "tp2": (Mesh(tp=2), [], ""),
    "tp4": (Mesh(tp=4), [], "tokens"),
    "tp2 x dp2, zero 3": (Mesh(tp=2, dp=2), [recipes.data_parallel(zero=3)], "tokens"),
    "cp2 x dp2, zero 3 over both": (
        Mesh(cp=2, dp=2),
        [*recipes.context_parallel(), *recipes.data_parallel(over=("dp", "cp"), zero=3)],
        "",
    ),
}


def saved_job(name: str) -> Any:
    """How a strategy of `SAVED` is compiled, for batches of two rows; without shard for one device."""
    mesh, directives, stream = SAVED[name]
    if mesh.size("tp") == 1:
        return piper.compile(shared_jobs.job("gpt", 2), Strategy(mesh, directives))
    return shared_jobs.compiled("gpt", mesh, directives, stream=stream, rows=2)


@pytest.mark.long
@pytest.mark.parametrize("every", [False, True])
def test_checkpoints_know_no_devices(every: bool, tmp_path: Path) -> None:
    """Fused weights too: each strategy goes on from the checkpoint of the next one, or of all others."""
    plans = {name: saved_job(name) for name in SAVED}
    whole = {
        n: shared_jobs.run(made, checkpoint=Checkpoints(tmp_path / n, every=2))
        for n, made in plans.items()
    }
    wanted = whole["one device"].state_dict()
    following = dict(zip(SAVED, [*SAVED][1:] + [*SAVED][:1], strict=True))
    for name, made in plans.items():
        for other in SAVED if every else [following[name]]:
            found = shared_jobs.run(made, steps=1, resume=tmp_path / other / "step-00000002")
            assert found.losses == pytest.approx(whole["one device"].losses[2:], rel=1e-9)
            for key, tensor in found.state_dict().items():
                assert (tensor - wanted[key]).norm() <= 1e-9 * wanted[key].norm(), (
                    f"{other} resumed as {name}: {key}"
                )
