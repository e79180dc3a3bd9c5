"""Sizes and costs of captured programs: affine in rows, equal to real runs, and to formulas written by hand."""

from __future__ import annotations

import pickle
from collections import Counter
from functools import cache, partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from packages.capture.tests.chunk_dag import ChunkDag
from piper_capture import Captured, capture, compile_step, flatten_batch, named_tensors
from piper_capture.trace import tracing
from piper_ir.ground.errors import CaptureError
from piper_ir.ground.sizes import Affine, bind
from piper_ir.program.program import Chunk, Cost, Kernel, Program
from tests.helpers.cases import each_case
from tests.helpers.models import (
    CASES,
    VOCAB,
    D,
    T,
    TinyGPT,
    captured,
    cast,
    cross_entropy,
)

WIDTH, LENGTH, HEADS, ROWS = 32, 64, 2, 3


def kernels(cost: Cost) -> Counter[Kernel]:
    """Equal kernels that are listed apart count as one kind: at some numbers of rows sizes coincide."""
    found: Counter[Kernel] = Counter()
    for k in cost.kernels:
        found[Kernel(k.kind, k.dims, k.dtype, k.flops, k.bytes)] += k.count
    return found


@each_case("name", ["gpt", "buffers", "keywords"])
def test_affine_sizes_are_exact_at_other_rows(name: str) -> None:
    found = captured(name)
    for rows in (1, 7):
        for chunk in {c.code: c for c in found.bind(rows).chunks}.values():
            traced = found.code.trace(chunk.code, rows)
            assert dict(chunk.ports) == dict(traced.ports)
            for step, signature in chunk.steps.items():
                exact = traced.steps[step].bind(rows)
                assert (signature.reads, signature.writes, signature.accumulates) == (
                    exact.reads,
                    exact.writes,
                    exact.accumulates,
                )
                assert kernels(signature.cost) == kernels(exact.cost)
                assert signature.liveness == exact.liveness


def test_the_cost_of_attention_names_the_lowering_it_assumes() -> None:
    layer = captured("gpt").program.chunk("layer0")
    for step in ("F", "I"):
        named = {k.kind: k.lowering for k in layer.steps[step].cost.kernels}
        assert named["attention"] == "flash" and named["matmul"] == ""
    bound = layer.steps["F"].cost.bind(ROWS)
    assert [k.lowering for k in bound.kernels if k.kind == "attention"] == ["flash"]


class Coincident(nn.Module):
    """Parameters of 16, 24 and 88 elements: as many as a batch of 2, 3 and 11 rows has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(n)) for n in (16, 24, 88, 88))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        for scale in self.scales:
            y = y * torch.tanh(scale).sum()
        return y


def test_kernels_that_coincide_at_some_rows_are_told_apart() -> None:
    def batch(rows: range) -> tuple[Tensor, Tensor]:
        return torch.ones(len(rows), 8), torch.ones(len(rows), 8)

    found = capture(Coincident, batch, nn.functional.mse_loss)
    cost = found.program.chunks[0].steps["F"].cost
    launched = [(k.count, k.bytes) for k in cost.kernels if k.op == "tanh"]
    assert launched == [
        (1, Affine(0, 64)),
        (1, 128),
        (1, 192),
        (2, 704),
    ]  # elements of 4 bytes, read and written
    for rows in (1, 2, 3, 11):
        [chunk] = found.bind(rows).chunks
        assert sum(k.count for k in chunk.steps["F"].cost.kernels if k.op == "tanh") == 5
        assert kernels(chunk.steps["F"].cost) == kernels(
            found.code.trace(chunk.code, rows).steps["F"].bind(rows).cost
        )


def test_kernels_name_their_operators() -> None:
    """In place or not: the sum of a residual and that of gradients are both `add`."""
    steps = [sig for chunk in captured("gpt").program.chunks for sig in chunk.steps.values()]
    found = {k.op: k.kind for sig in steps for k in sig.cost.bind(ROWS).kernels}
    expected = {
        "add": "elementwise",
        "gelu": "elementwise",
        "mm": "matmul",
        "layer_norm": "norm",
        "embedding": "embedding",
    }
    expected |= {
        "cross_entropy": "loss",
        "cross_entropy_dgrad": "loss",
        "attention": "attention",
        "attention_dgrad": "attention",
    }
    assert expected.items() <= found.items(), found
    assert all(op and not op.endswith("_") and "::" not in op for op in found)


def test_rows_below_one_are_refused() -> None:
    found = captured("gpt")
    with pytest.raises(CaptureError, match="at least one"):
        found.code.get(found.program.chunks[0].code, 0)


@pytest.mark.parametrize("name", ["gpt", "llama", "frozen", "in_place"])
def test_a_real_run_keeps_as_many_bytes_as_the_program_says(name: str) -> None:
    case, found = CASES[name], captured(name)
    state = {n: cast(t.detach(), torch.float64) for n, t, _ in named_tensors(case.model())}
    run = ChunkDag(found, ROWS, state).run(
        flatten_batch(*cast(case.batch(0, range(ROWS)), torch.float64))
    )
    for chunk, affine in zip(found.bind(ROWS).chunks, found.program.chunks, strict=True):
        owned = [p for step in chunk.steps.values() for p in step.writes]
        storages = {
            run.ports[chunk.id, p].untyped_storage().data_ptr(): run.ports[
                chunk.id, p
            ].untyped_storage()
            for p in owned
        }
        assert sum(s.nbytes() for s in storages.values()) == sum(
            chunk.ports[p].nbytes for p in owned
        )
        assert len(storages) == len(owned)
        assert sum(bind(affine.ports[p].nbytes, ROWS) for p in owned) == sum(
            bind(chunk.ports[p].nbytes, 0) for p in owned
        )


def long_batch(rows: range) -> tuple[Tensor, Tensor]:
    tokens = torch.zeros(len(rows), LENGTH, dtype=torch.int64)
    return tokens, tokens


def layer_of(program: Program) -> Chunk:
    return next(c for c in program.chunks if "layer" in c.coords)


def squares(chunk: Chunk) -> list[str]:
    return [
        p
        for p, spec in chunk.ports.items()
        if p.startswith(("saved", "iw")) and spec.shape.count(LENGTH) > 1
    ]


def gpt(layers: int = 1) -> nn.Module:
    return TinyGPT(layers=layers, d=WIDTH, length=LENGTH)


@cache
def block() -> Captured:
    return capture(gpt, long_batch, cross_entropy, dtype=torch.bfloat16)


class MathAttention(nn.Module):
    """The same block with attention written out: it saves T x T matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH)])

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.layers[0](self.embed(tokens)).chunk(3, dim=-1)
        with torch.no_grad():
            mask = torch.ones(LENGTH, LENGTH, device=q.device, dtype=torch.bool).tril()
        weights = (q @ k.transpose(1, 2)).masked_fill(~mask, float("-inf")).softmax(dim=-1)
        return (weights @ v) @ self.embed.weight.t()


def test_a_bf16_gpt_block_saves_no_square_of_the_sequence() -> None:
    chunk = layer_of(block().program)
    assert squares(chunk) == []
    assert {chunk.ports[p].dtype for p in chunk.ports if p.startswith("saved")} == {
        "bfloat16",
        "float32",
    }  # statistics in float32
    written_out = capture(MathAttention, long_batch, cross_entropy, dtype=torch.bfloat16).program
    assert [p for c in written_out.chunks for p in squares(c)]


def total(chunk: Chunk, step: str, kind: str) -> int:
    return sum(bind(k.flops, 0) * k.count for k in chunk.steps[step].cost.kernels if k.kind == kind)  # type: ignore[index]  # a Step


def test_flops_of_a_gpt_block() -> None:
    """Matmuls: 2 (3 + 1 + 4 + 4) d^2 per token in each of F, I and W. Causal attention per row and head: 2 T^2 hd for
    each product over half the square: two products forward, five backward, one of which is the forward's again."""
    chunk = layer_of(block().bind(ROWS))
    assert [total(chunk, s, "matmul") for s in "FIW"] == [2 * 12 * WIDTH**2 * ROWS * LENGTH] * 3
    product_flops = ROWS * LENGTH * LENGTH * WIDTH
    assert [total(chunk, s, "attention") for s in "FIW"] == [
        2 * product_flops,
        5 * product_flops,
        0,
    ]


def test_flops_of_a_llama_block() -> None:
    """4 heads, 2 of keys: matmuls 2 (d^2 + 2 d kv + d^2 + 3 d hidden) per token in each of F, I and W."""
    chunk = layer_of(captured("llama").bind(ROWS))
    kv, hidden = D // 2, 2 * D
    assert [total(chunk, s, "matmul") for s in "FIW"] == [
        2 * (2 * D * D + 2 * D * kv + 3 * D * hidden) * ROWS * T
    ] * 3
    assert [total(chunk, s, "attention") for s in "FIW"] == [
        2 * ROWS * T * T * D,
        5 * ROWS * T * T * D,
        0,
    ]


@cache
def narrow() -> Captured:
    """Return a capture in float32, which is that of no other test."""
    case = CASES["skip"]
    return capture(case.model, partial(case.batch, 0), case.loss)


def test_a_hundred_microbatch_sizes_are_one_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    found = narrow()
    runs = []
    real = tracing._run
    monkeypatch.setattr(tracing, "_run", lambda *args: runs.append(1) or real(*args))
    for rows, _ in product(range(2, 52), range(2)):
        found.bind(rows)
    assert found.code.get(found.program.chunks[0].code, 6) is found.code.get(
        found.program.chunks[0].code, 6
    )
    assert not runs


def test_code_that_is_not_what_the_program_describes_is_refused() -> None:
    found = narrow()
    first, second = found.program.chunks[1:3]
    found.code.get(first.code, 3)
    found.code.expect(first.code, second)
    with pytest.raises(CaptureError, match=r"at 3 rows, but reads .* at fewer rows"):
        found.code.get(first.code, 3)


def test_code_ships_once_and_runs_after_pickling() -> None:
    found = captured("gpt")
    layers = [c for c in found.program.chunks if "layer" in c.coords]
    shipped = pickle.loads(pickle.dumps(found.code.export([c.code for c in layers], ROWS)))
    assert list(shipped) == [layers[0].code]
    bound = found.bind(ROWS).chunks[1]
    args = [torch.zeros(bound.ports[p].shape, dtype=torch.float64) for p in bound.steps["F"].reads]
    with torch.no_grad():
        assert len(compile_step(shipped[layers[0].code]["F"])(args)) == len(bound.steps["F"].writes)


def test_the_dtype_of_the_parameters_is_part_of_the_code() -> None:
    assert {p.spec.dtype for p in narrow().program.params} == {"float32"}
    assert {p.spec.dtype for p in captured("skip").program.params} == {"float64"}
    assert not set(narrow().code) & set(captured("skip").code)


def test_the_users_module_is_not_touched() -> None:
    model = CASES["buffers"].model()
    before = {n: t.clone() for n, t, _ in named_tensors(model)}
    case = CASES["buffers"]
    capture(model, partial(case.batch, 0), case.loss, dtype=torch.float64)
    assert all(
        torch.equal(before[n], t) and t.dtype == before[n].dtype for n, t, _ in named_tensors(model)
    )


class ReadsValues(nn.Module):
    """Reads values of tensors in its constructor, as drop-path schedules do."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [x.item() for x in torch.linspace(0.5, 1, 2)]
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in self.rates)

    def forward(self, x: Tensor) -> Tensor:
        for rate, layer in zip(self.rates, self.layers, strict=True):
            x = layer(x) * rate
        return x


def test_a_constructor_that_reads_values_runs_for_real() -> None:
    case = CASES["skip"]
    found = capture(ReadsValues, partial(case.batch, 0), case.loss).program
    assert [c.id for c in found.chunks] == ["layer0", "layer1", "root"]
    assert found.chunks[0].code != found.chunks[1].code  # the rates differ
