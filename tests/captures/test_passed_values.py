"""What passes between chunks and is no stream of tokens: masks of queries and keys, and a memory that many layers
read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import Mesh, recipes
from piper_capture.store import sharding
from piper_compiler import Strategy
from piper_compiler.passes.program import moves
from piper_ir.ground.errors import CompileError, DirectiveError
from piper_ir.ground.select import where
from piper_runtime.launch.ground.result import Run
from tests.helpers import parity
from tests.helpers.cases import each_case

WIDTH, WORDS, LENGTH, ROWS = 8, 12, 8, 4
HALF = piper.split(where(), microbatches=2)
CUT = piper.shard(where(), cut=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            layer(given).unflatten(-1, (2, -1)).transpose(1, 2)
            for layer, given in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        return self.out(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        )


class Masked(nn.Module):
    """Two layers that read one mask, which forward makes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embed, self.head = kind, nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.bias = nn.Parameter(torch.randn(LENGTH, LENGTH)) if kind == "learned" else None

    def forward(self, tokens: Tensor) -> Tensor:
        mask = {
            "tril": lambda: torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool)),
            "square": lambda: nn.Transformer.generate_square_subsequent_mask(
                LENGTH, dtype=torch.float64
            ),
            "learned": lambda: 2 * self.bias,
        }[self.kind]()
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x, x, mask)
        return self.head(x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = Attention(), Attention()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.own(x, x)
        return x + self.cross(x, memory)


class Translator(nn.Module):
    """Every layer of the decoder reads what the encoder has made."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.encoder = nn.ModuleList(Attention() for _ in range(2))
        self.decoder = nn.ModuleList(Decoder() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        memory = self.embed(tokens)
        for layer in self.encoder:
            memory = memory + layer(memory, memory)
        x = self.embed(tokens.flip(1))
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(x)


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    whole = torch.randint(WORDS, (2, ROWS, LENGTH), generator=torch.Generator().manual_seed(step))[
        :, rows.start : rows.stop
    ]
    return whole[0], whole[1]


def loss(logits: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())


def job(model: Any) -> piper.Job:
    return piper.Job(
        model,
        batch,
        loss,
        lambda n: torch.optim.SGD([p for _, p in n], lr=0.1),
        ROWS,
        precision=piper.Precision(params="float64"),
    )


MASKED = {kind: job(lambda kind=kind: Masked(kind)) for kind in ("tril", "square", "learned")}
TRANSLATOR = job(Translator)


def assert_right(job: piper.Job, mesh: Mesh, *directives: Any) -> Any:
    made = piper.compile(job, Strategy(mesh, directives))
    found: Run = piper.execute(made, steps=2, launcher="inline", gradients=True)
    expected = parity.reference(
        job, replicas=made.plan.replicas, microbatches=made.plan.microbatches, steps=2
    )
    parity.assert_parity(found, expected, label=f"{mesh}")
    return made


@pytest.mark.long
@each_case(("kind", "attention"), [("tril", "heads"), ("square", "gather"), ("learned", "heads")])
def test_a_mask_is_cut_along_its_queries(kind: str, attention: str) -> None:
    """Both dimensions of a mask are the tokens of layers, and two loops where the mask is made. Heads need all of
    it."""
    tokens = piper.shard(where(), over="cp", index="tokens", attention=attention)
    made = assert_right(
        MASKED[kind], Mesh(cp=2, pp=2), tokens, recipes.one_f_one_b(pp=2, microbatches=2)
    )
    (mask,) = [
        o.spec.shape
        for c in made.plan.chunks
        for o in c.outputs
        if o.kind == "value" and len(o.spec.shape) == 2
    ]
    whole = attention == "heads" and kind != "learned"
    assert mask == (LENGTH if whole else LENGTH // 2, LENGTH)


@pytest.mark.long
def test_a_ring_refuses_a_mask() -> None:
    with pytest.raises(
        DirectiveError,
        match=r'has a mask, of which each device would need other columns .* attention="gather"',
    ):
        assert_right(
            MASKED["tril"],
            Mesh(cp=2),
            piper.shard(where(), over="cp", index="tokens", attention="ring"),
            HALF,
        )


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("tril", marks=pytest.mark.long), "learned"])
def test_sequence_parallelism_sees_a_mask_alike(kind: str) -> None:
    assert_right(MASKED[kind], Mesh(tp=2), piper.shard(where(), stream="tokens"), HALF)


@pytest.mark.long
@pytest.mark.parametrize("recipe", [recipes.one_f_one_b, recipes.zbv], ids=["1f1b", "zbv"])
def test_a_term_that_another_stage_reads_is_summed_up_there(recipe: Any) -> None:
    """The embedding of the decoder's words is a term that the first stage sends; each layer sends back one of the
    memory's gradient."""
    made = assert_right(TRANSLATOR, Mesh(tp=2, pp=2), CUT, recipe(pp=2, microbatches=2))
    sums = {
        p.reads[0]
        for r in made.plan.roles
        for i in r.program
        for p in i.parts
        if p.writes and p.writes[0].endswith("#tp")
    }
    assert any(value.endswith("#pp1") for value in sums) and any(
        value.endswith("#pp0") for value in sums
    )


@pytest.mark.long
@pytest.mark.parametrize("mended", [pytest.param("sum", marks=pytest.mark.long), "mask"])
def test_what_does_not_fit_is_no_plan(mended: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the two above, compile says so itself: neither a simulation nor a search scores what cannot run."""
    if mended == "sum":
        monkeypatch.setattr(moves, "_sum", lambda *given: None)
        job, mesh, said = (
            TRANSLATOR,
            Mesh(tp=2),
            r"reads shared0:out0 as in0, .* asks for shared0:out0 summed over tp\.",
        )
        asked = (piper.shard(where(), cut=True), HALF)
    else:
        monkeypatch.setattr(sharding, "masks", lambda *given: frozenset())
        job, mesh, said = (
            MASKED["learned"],
            Mesh(cp=2),
            r"R07-signature: input 7 of chunk layer0 is the value root:out0",
        )
        asked = (
            piper.shard(where(), over="cp", index="tokens", order="blocks"),
            piper.split(where(), microbatches=4),
        )
    with pytest.raises(CompileError, match=said):
        piper.compile(job, Strategy(mesh, asked))
