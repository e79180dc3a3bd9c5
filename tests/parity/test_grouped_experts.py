"""Experts by grouped products: how many FLOPs are predicted, and what is said of operators without a formula."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper_report.facts.summary import prediction_table
from piper_simulator import simulate

TOKENS, WIDTH, INNER, EXPERTS, TOP = 16, 32, 64, 4, 2
ROWS, MICROBATCHES = 4, 2


class Experts(nn.Module):
    """A router and experts in the form of Hugging Face's: tokens sorted by expert, two grouped products."""

    def __init__(self, product: str) -> None:
        super().__init__()
        self.product = product
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.1)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weight, expert = self.router(tokens).softmax(-1).topk(TOP, -1)
        order = expert.reshape(-1).argsort(stable=True)
        ends = nn.functional.one_hot(expert.reshape(-1), EXPERTS).sum(0).cumsum(0).to(torch.int32)
        picked = tokens.repeat_interleave(TOP, 0)[order]
        product = PRODUCT[self.product]
        out = product(product(picked, self.up, ends).relu(), self.down, ends)
        out = out * weight.reshape(-1)[order][:, None]
        return x + out[order.argsort()].reshape(-1, TOP, WIDTH).sum(1).reshape(x.shape)


def by_group(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Each row times the matrix of its group, with sizes that do not depend on the groups."""
    group = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device), right=True)
    return torch.bmm(x[:, None], weight[group])[:, 0]


@torch.library.custom_op("transformers::grouped_mm_fallback", mutates_args=())
def fallback(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return by_group(input, weight, offs)


@fallback.register_fake
def _(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return input.new_empty(input.shape[0], weight.shape[2])


@torch.library.custom_op("grouped_for_tests::unknown", mutates_args=())
def unknown(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return by_group(input, weight, offs)


@unknown.register_fake
def _(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return input.new_empty(input.shape[0], weight.shape[2])


def setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def gradients(op: Any) -> Any:
    """Gradients by the same op: of the input exactly; of the weight as a sum of outer products, elsewhere than in the
    op."""

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, ends = ctx.saved_tensors
        group = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device), right=True)
        outer = torch.zeros_like(weight).index_add(
            0, group, torch.bmm(x[:, :, None], grad[:, None])
        )
        return op(grad.contiguous(), weight.transpose(1, 2).contiguous(), ends), outer, None

    return backward


torch.library.register_autograd(
    "transformers::grouped_mm_fallback", gradients(fallback), setup_context=setup
)
torch.library.register_autograd(
    "grouped_for_tests::unknown", gradients(unknown), setup_context=setup
)


def of_torch(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return torch._grouped_mm(input.bfloat16(), weight.bfloat16(), offs=offs).float()


PRODUCT = {"hugging": fallback, "unknown": unknown, "torch": of_torch}


def batch(step: int, rows: slice) -> tuple[Tensor, Tensor]:
    x = torch.zeros(rows.stop - rows.start, TOKENS, WIDTH)
    return x, x


def compiled(product: str) -> piper.Compiled:
    job = piper.Job(
        model=lambda: Experts(product), batch=batch, loss=nn.functional.mse_loss, optimizer=torch.optim.SGD,
        global_batch=ROWS * MICROBATCHES, tokens_per_row=TOKENS,
    )  # fmt: skip
    return piper.compile(
        job, piper.Strategy(piper.Mesh(), [piper.split(piper.where(), MICROBATCHES)])
    )


def flops_of(made: piper.Compiled, op: str, step: str) -> int:
    kernels = [k for c in made.plan.chunks for k in c.steps[step].cost.kernels if k.op == op]
    return sum(k.flops * k.count for k in kernels)


@pytest.fixture(scope="module")
def hugging() -> piper.Compiled:
    return compiled("hugging")


def test_grouped_products_count_all_rows_once(hugging: piper.Compiled) -> None:
    """Two products of TOP x tokens rows, and two for the gradients of their inputs."""
    each = 2 * ROWS * TOKENS * TOP * WIDTH * INNER
    assert flops_of(hugging, "transformers::grouped_mm_fallback", "F") == 2 * each
    backward = [
        flops_of(hugging, "transformers::grouped_mm_fallback", s)
        for s in ("I", "W")
        if s in hugging.plan.chunks[0].steps
    ]
    assert sum(backward) == 2 * each or sum(backward) == each, (
        "the first product's input may need no gradient"
    )


def test_model_flops_count_the_experts_that_a_token_visits(hugging: piper.Compiled) -> None:
    """N is the router and TOP of EXPERTS experts."""
    n = WIDTH * EXPERTS + 2 * WIDTH * INNER * TOP
    found = simulate(hugging.plan, "h100x8")
    whole = simulate(
        hugging.plan, "h100x8", model_flops_per_step=6 * n * ROWS * MICROBATCHES * TOKENS
    )
    assert found.mfu == pytest.approx(whole.mfu)
    assert found.summary()["without_formula"] == {} and not any(
        "formula" in note for note in found.notes
    )


@pytest.mark.long
def test_grouped_products_of_torch_count_all_rows_once() -> None:
    made = compiled("torch")
    assert flops_of(made, "_grouped_mm", "F") == 4 * ROWS * TOKENS * TOP * WIDTH * INNER
    assert simulate(made.plan, "h100x8").summary()["without_formula"] == {}


@pytest.mark.long
def test_an_op_without_a_formula_is_named_with_its_share_of_the_bytes() -> None:
    made = compiled("unknown")
    found = simulate(made.plan, "h100x8")
    share = found.summary()["without_formula"]["grouped_for_tests::unknown"]
    sums = [0, 0]
    for kernel in (k for c in made.plan.chunks for s in c.steps.values() for k in s.cost.kernels):
        sums[kernel.op == "grouped_for_tests::unknown"] += kernel.bytes * kernel.count
    assert share == pytest.approx(sums[1] / sum(sums)) and share > 0.01
    (note,) = (n for n in found.notes if "no formula" in n)
    assert (
        f"grouped_for_tests::unknown ({share:.1%} of the bytes moved)" in note
        and "piper.op_cost" in note
    )
    assert f"warning: {note}" in prediction_table(found, title="").plain()
    json.dumps(found.summary())


@pytest.mark.long
def test_a_utilisation_above_all_is_not_left_without_a_word() -> None:
    made = compiled("unknown")
    plausible = simulate(made.plan, "h100x8")
    assert (
        plausible.mfu is not None
        and plausible.mfu < 1
        and not any("above its peak" in n for n in plausible.notes)
    )
    found = simulate(made.plan, "h100x8", model_flops_per_step=1e15)
    (note,) = (n for n in found.notes if "above its peak" in n)
    assert note.startswith("model FLOP utilisation of ") and "without a formula are missing" in note
    other = simulate(compiled("hugging").plan, "h100x8", model_flops_per_step=1e15)
    assert any("6 N per token" in n for n in other.notes)
