"""Experts by ops equal a plain loop over experts: values and gradients, an expert without tokens, rows behind the last
group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from piper_ops import (
    DIRECT,
    OP_KERNELS,
    PORTABLE,
    UnsupportedVariant,
    cpu_workspace,
    cuda_workspace,
    grouped_mm,
    grouped_mm_dgrad,
    grouped_mm_wgrad,
    grouped_mm_wgrad_,
    kernel_of,
    peak_bytes_inside,
    route,
    unroute,
    unroute_wgrad,
)
from piper_ops.experts import bags, experts
from tests.helpers.cases import each_case

TOLERANCE = 1e-12
TOKENS, WIDTH, HIDDEN, EXPERTS, TOP = 13, 6, 10, 5, 2
EMPTY = 3
"""The expert that no token chooses."""


def choices(tokens: int = TOKENS, top: int = TOP) -> Tensor:
    """Different experts for each token, and never the one that is to be empty."""
    left = torch.tensor([e for e in range(EXPERTS) if e != EMPTY])
    return torch.stack([left[torch.randperm(len(left))[:top]] for _ in range(tokens)])


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()


def by_loop(x: Tensor, chosen: Tensor, share: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Each expert in turn, on the tokens that chose it."""
    out = torch.zeros_like(x)
    for expert in range(up.shape[0]):
        token, choice = (chosen == expert).nonzero(as_tuple=True)
        made = F.silu(x[token] @ up[expert]) @ down[expert]
        out = out.index_add(0, token, made * share[token, choice, None])
    return out


def by_ops(x: Tensor, chosen: Tensor, share: Tensor, up: Tensor, down: Tensor) -> Tensor:
    rows, counts = route(x, chosen, up.shape[0])
    made: Tensor = unroute(
        grouped_mm(F.silu(grouped_mm(rows, counts, up)), counts, down), chosen, share
    )
    return made


def inputs(top: int = TOP) -> list[Tensor]:
    return [
        drawn(TOKENS, WIDTH),
        drawn(TOKENS, top),
        drawn(EXPERTS, WIDTH, HIDDEN),
        drawn(EXPERTS, HIDDEN, WIDTH),
    ]


def difference(top: int = TOP) -> float:
    """The largest one between loop and ops, of the result and of all gradients."""
    x, share, up, down = leaves = inputs(top)
    chosen, tangent = choices(top=top), torch.randn(WIDTH, TOKENS, dtype=torch.float64).t()
    results = []
    for function in (by_ops, by_loop):
        out = function(x, chosen, share, up, down)
        results.append((out, *torch.autograd.grad(out, leaves, tangent)))
    return max(float((a - b).detach().abs().max()) for a, b in zip(*results, strict=True))


@each_case("top", [1, 2, 4])
def test_experts_by_ops_equal_a_loop(top: int) -> None:
    assert difference(top) < TOLERANCE


WRONG: dict[str, tuple[str, Any]] = {
    "combined without shares": (
        "unroute",
        lambda right: lambda rows, chosen, share: right(rows, chosen, share.abs().sign()),
    ),
    "rows in the order of choices": (
        "places",
        lambda right: lambda chosen: torch.arange(chosen.numel()),
    ),
    "sorted the other way around": (
        "order",
        lambda right: lambda chosen, *_: torch.sort(chosen.flatten(), descending=True).indices,
    ),
}


@each_case("name", WRONG)
def test_the_loop_sees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attribute, wrong = WRONG[name]
    if attribute == "unroute":
        monkeypatch.setitem(globals(), "unroute", wrong(unroute))
    else:
        monkeypatch.setattr(bags, attribute, wrong(getattr(bags, attribute)))
    assert difference() > 1e-3


def test_rows_are_sorted_by_expert_then_by_token() -> None:
    chosen = torch.tensor([[2, 0], [0, 2], [2, 1]])
    x = torch.tensor([[1.0], [2.0], [3.0]])
    rows, counts = route(x, chosen, 4)
    assert rows.flatten().tolist() == [1, 2, 3, 1, 2, 3] and counts.tolist() == [2, 1, 3, 0]
    assert unroute(
        rows, chosen, torch.tensor([[1.0, 0.5], [0.25, 0], [2, 1]])
    ).flatten().tolist() == [1.5, 0.5, 9]


def test_a_token_may_choose_an_expert_twice() -> None:
    chosen, x = torch.tensor([[1, 1], [0, 1]]), drawn(2, WIDTH)
    rows, counts = route(x, chosen, 2)
    out = unroute(rows, chosen, torch.full((2, 2), 0.5, dtype=torch.float64))
    assert counts.tolist() == [1, 3] and torch.equal(out, x)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.ones_like(x))


def test_an_expert_without_tokens_has_zeros_as_gradient() -> None:
    leaves = inputs()
    grads = torch.autograd.grad(by_ops(leaves[0], choices(), *leaves[1:]).sum(), leaves[2:])
    for grad in grads:
        assert not grad[EMPTY].any() and all(grad[e].any() for e in range(EXPERTS) if e != EMPTY)


def test_rows_behind_the_last_group_are_zero_and_give_nothing() -> None:
    """Whatever they hold, in value and both gradients."""
    counts, weight = torch.tensor([2, 0, 3]), drawn(3, WIDTH, HIDDEN)
    rows, grad = drawn(9, WIDTH).detach(), drawn(9, HIDDEN).detach()
    rows[5:], grad[5:] = float("nan"), float("nan")
    out, of_rows = grouped_mm(rows, counts, weight), grouped_mm_dgrad(grad, counts, weight)
    assert not out[5:].any() and not of_rows[5:].any() and bool(out[:5].all())
    assert bool(grouped_mm_wgrad(rows, counts, grad).isfinite().all())


@each_case("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_dtypes_are_near_float64(dtype: torch.dtype) -> None:
    x, share, up, down = (t.detach().to(dtype) for t in inputs())
    chosen = choices()
    wide = by_ops(x.double(), chosen, share.double(), up.double(), down.double())
    narrow = by_ops(x, chosen, share, up, down)
    assert narrow.dtype == dtype
    assert float((narrow.double() - wide).norm() / wide.norm()) < 4 * torch.finfo(dtype).eps


def test_sums_over_choices_are_in_float32() -> None:
    """Eight shares of which each is less than half a digit of the first: bfloat16 would lose seven."""
    chosen, share = (
        torch.arange(8).view(1, 8),
        torch.tensor([[1.0, *[2**-9] * 7]], dtype=torch.bfloat16),
    )
    rows, _ = route(torch.ones(1, 4, dtype=torch.bfloat16), chosen, 8)
    assert unroute(rows, chosen, share)[0, 0] == torch.tensor(1 + 7 * 2**-9).bfloat16() > 1


def test_shares_of_another_dtype_have_gradients_in_theirs() -> None:
    chosen, share = choices(), drawn(TOKENS, TOP, dtype=torch.float32)
    rows = drawn(TOKENS * TOP, WIDTH, dtype=torch.bfloat16)
    out = unroute(rows, chosen, share)
    of_rows, of_share = torch.autograd.grad(out.sum(), (rows, share))
    assert (out.dtype, of_rows.dtype, of_share.dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )


CALLS: dict[str, Any] = {
    "route": lambda x, c, s, r, n, w, g: (x, c, EXPERTS),
    "route_dgrad": lambda x, c, s, r, n, w, g: (r, c),
    "grouped_mm": lambda x, c, s, r, n, w, g: (r, n, w),
    "grouped_mm_dgrad": lambda x, c, s, r, n, w, g: (g, n, w),
    "grouped_mm_wgrad": lambda x, c, s, r, n, w, g: (r, n, g),
    "grouped_add": lambda x, c, s, r, n, w, g: (g, n, w[:, 0]),
    "grouped_add_wgrad": lambda x, c, s, r, n, w, g: (g, n),
    "unroute": lambda x, c, s, r, n, w, g: (r, c, s),
    "unroute_dgrad": lambda x, c, s, r, n, w, g: (x, c, s),
    "unroute_wgrad": lambda x, c, s, r, n, w, g: (x, c, r, torch.float32),
}


def call(
    name: str, dtype: torch.dtype = torch.float32, tokens: int = TOKENS
) -> tuple[Any, tuple[Any, ...]]:
    x, share, up, _ = (t.detach().to(dtype) for t in inputs())
    x, share, chosen = (t.repeat(tokens // TOKENS, 1) for t in (x, share, choices()))
    rows, counts = route(x, chosen, EXPERTS)
    grad = torch.randn(len(rows), HIDDEN).to(dtype)
    return getattr(torch.ops.piper, name).default, CALLS[name](
        x, chosen, share, rows, counts, up, grad
    )


@each_case("dtype", [torch.float64, torch.bfloat16])
@each_case("name", CALLS)
def test_fake_and_real_results_look_alike(name: str, dtype: torch.dtype) -> None:
    op, args = call(name, dtype)
    real = op(*args)
    fake = op(*(a.to("meta") if isinstance(a, Tensor) else a for a in args))
    for a, b in zip(
        *((made if isinstance(made, tuple) else (made,)) for made in (real, fake)), strict=True
    ):
        assert (a.shape, a.dtype, a.stride()) == (
            b.shape,
            b.dtype,
            b.stride(),
        ) and a.is_contiguous()


@each_case("name", CALLS)
def test_kernels_called_directly_give_what_the_ops_give(name: str) -> None:
    op, args = call(name)
    ours, theirs = (
        made if isinstance(made, tuple) else (made,) for made in (DIRECT[op](*args), op(*args))
    )
    assert all(
        torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(ours, theirs, strict=True)
    )


def test_calls_cover_the_ops_of_experts() -> None:
    ops = {
        f.op._schema.name
        for n in ("route", "grouped_mm", "grouped_add", "unroute")
        for f in PORTABLE[n].formulas
    }
    assert ops == {f"piper::{name}" for name in CALLS}


@each_case("dtype", [torch.float32, torch.float64, torch.bfloat16])
@each_case("name", CALLS)
def test_kernels_hold_what_is_counted(name: str, dtype: torch.dtype) -> None:
    op, args = call(name, dtype)
    assert peak_bytes_inside(OP_KERNELS[op], *args) == cpu_workspace(op, args, op(*args))


@each_case("dtype", [torch.float32, torch.float64, torch.bfloat16])
@each_case("name", [n for n in CALLS if "route" in n])
def test_a_gpu_holds_what_its_kernel_holds_here(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "_refuse_unknown", lambda chosen, experts: None)  # asks a GPU
    op, args = call(name, dtype)
    held = peak_bytes_inside(getattr(experts, f"_{name}_picked"), *args)
    found = cuda_workspace(op, args, op(*args))
    assert found is not None and found.bytes >= held > 0


@each_case("dtype", [torch.float32, torch.float64])
@each_case("name", [n for n in CALLS if "route" in n])
def test_sums_in_bags_are_those_of_rows_one_by_one(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: places that are off by one."""
    monkeypatch.setattr(experts, "_refuse_unknown", lambda chosen, experts: None)
    args = tuple(dtype if isinstance(a, torch.dtype) else a for a in call(name, dtype)[1])
    exact = 64 * torch.finfo(dtype).eps
    ours, theirs = (
        k(*args) for k in (experts.CPU_KERNELS[name], getattr(experts, f"_{name}_picked"))
    )
    torch.testing.assert_close(ours, theirs, rtol=exact, atol=exact)
    right = bags.order
    monkeypatch.setattr(bags, "order", lambda *args: right(*args).roll(1))
    wrong = experts.CPU_KERNELS[name](*args)
    first, other = (made[0] if isinstance(made, tuple) else made for made in (wrong, theirs))
    assert not torch.allclose(first, other)


@each_case("experts_of", [3, 1 << 15, 1 << 20])
def test_choices_are_sorted_as_torch_sorts_them(experts_of: int) -> None:
    chosen = torch.randint(experts_of, (50, 4))
    assert torch.equal(bags.order(chosen), chosen.view(-1).sort(stable=True).indices)


@each_case("name", [n for n in CALLS if "grouped" not in n])
def test_what_kernels_hold_is_affine_in_the_tokens(name: str) -> None:
    one, two, three = (
        cpu_workspace(*(c := call(name, tokens=n * TOKENS)), c[0](*c[1])) for n in (1, 2, 3)
    )
    assert three - two == two - one > 0


def test_flops_are_those_of_all_rows_once() -> None:
    for name, dims in {
        "grouped_mm": (TOKENS * TOP, HIDDEN, WIDTH),
        "grouped_mm_dgrad": (TOKENS * TOP, WIDTH, HIDDEN),
        "grouped_mm_wgrad": (WIDTH, HIDDEN, TOKENS * TOP),
    }.items():
        op, args = call(name)
        info = kernel_of(op, args, made := op(*args))
        assert (info.kind, info.dims, info.flops) == (
            "matmul",
            dims,
            2 * TOKENS * TOP * WIDTH * HIDDEN,
        )
        tensors = [*args, made]
        assert info.bytes == sum(t.nbytes for t in tensors) and info.formula
    elements = TOKENS * TOP * WIDTH
    flops = {
        "route": 0,
        "route_dgrad": elements // 2,
        "unroute": 2 * elements,
        "unroute_dgrad": elements,
    }
    for name, count in {**flops, "unroute_wgrad": 2 * elements}.items():
        op, args = call(name)
        assert kernel_of(op, args, op(*args)).flops == count, name


BAD: dict[str, tuple[str, str]] = {
    "choices of another number of tokens": (
        "route(x, chosen[1:], 5)",
        "a row for each of the tokens",
    ),
    "choices in int32": ("route(x, chosen.int(), 5)", "int64"),
    "no experts": ("route(x, chosen, 0)", "experts=0"),
    "rows of three dimensions": ("route(x[None], chosen, 5)", "not \\(N, W\\)"),
    "counts for other experts": (
        "grouped_mm(rows, counts[1:], up)",
        "one for each of the 5 experts",
    ),
    "two dtypes": ("grouped_mm(rows.float(), counts, up)", "one floating-point dtype"),
    "other columns": ("grouped_mm(rows[:, 1:], counts, up)", "\\(M, K\\) and \\(E, K, N\\)"),
    "too few shares": ("unroute(rows, chosen, share[:, 1:])", "a share for each choice"),
    "too few rows": ("unroute(rows[1:], chosen, share)", "a share for each choice"),
}


@each_case("name", BAD)
def test_what_does_not_fit_is_refused(name: str) -> None:
    x, share, up, _ = (t.detach() for t in inputs())
    chosen = choices()
    rows, counts = route(x, chosen, EXPERTS)
    expression, reason = BAD[name]
    with pytest.raises(UnsupportedVariant, match=reason):
        eval(
            expression,
            {
                **globals(),
                "x": x,
                "share": share,
                "up": up,
                "chosen": chosen,
                "rows": rows,
                "counts": counts,
            },
        )


@each_case("expert", [-1, EXPERTS])
def test_an_expert_that_does_not_exist_is_refused(expert: int) -> None:
    chosen = choices()
    chosen[4, 1] = expert
    with pytest.raises(IndexError, match="there are 5, from 0 on"):
        route(inputs()[0], chosen, EXPERTS)


def test_counts_beyond_the_rows_are_refused() -> None:
    with pytest.raises(IndexError, match="add up to 9, and there are 8 rows"):
        grouped_mm(torch.zeros(8, 2), torch.tensor([4, 5]), torch.zeros(2, 2, 2))


def test_a_wgrad_that_nobody_wants_is_not_computed() -> None:
    rows, counts, up = drawn(4, WIDTH), torch.tensor([4, 0, 0, 0, 0]), inputs()[2].detach()
    (grad,) = torch.autograd.grad(grouped_mm(rows, counts, up).sum(), rows)
    assert torch.allclose(grad, up[0].sum(1).expand(4, -1))
    share = torch.ones(2, 2, dtype=torch.float64)
    assert unroute(rows, choices(2), share).grad_fn.next_functions[2][0] is None
    assert unroute_wgrad(
        drawn(2, WIDTH).detach(), choices(2), rows.detach(), torch.float64
    ).shape == (2, 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@each_case("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_cuda_computes_what_the_cpu_computes(dtype: torch.dtype) -> None:
    """Torch's grouped kernel in bfloat16, with an empty expert and rows behind the last one; else a product per
    expert."""
    counts, sizes = torch.tensor([40, 0, 24]), (3, 16, 32)
    rows, grad = torch.randn(80, 16).to(dtype), torch.randn(80, 32).to(dtype)
    weight = torch.randn(sizes).to(dtype)
    rows[64:], grad[64:] = float("nan"), float("nan")
    for op, args in (
        (grouped_mm, (rows, counts, weight)),
        (grouped_mm_dgrad, (grad, counts, weight)),
        (grouped_mm_wgrad, (rows, counts, grad)),
    ):
        here, there = op(*args), op(*(t.cuda() for t in args)).cpu()
        torch.testing.assert_close(
            here, there, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2
        )
        if op is not grouped_mm_wgrad:
            assert not there[64:].any()
        else:
            assert not there[1].any()
    assert experts.has_kernel(rows.cuda(), weight.cuda()) is (dtype == torch.bfloat16)


@each_case("dtype", [torch.float32, torch.float64])
def test_gradients_are_added_while_they_are_made(dtype: torch.dtype) -> None:
    """An expert without rows adds nothing, and rows behind the last group neither."""
    rows, grad, counts = (
        drawn(9, 4, dtype=dtype).detach(),
        drawn(9, 8, dtype=dtype).detach(),
        torch.tensor([3, 0, 4]),
    )
    total = drawn(3, 4, 8, dtype=dtype).detach()
    right = total + grouped_mm_wgrad(rows, counts, grad)
    assert grouped_mm_wgrad_(rows, counts, grad, total) is total
    torch.testing.assert_close(total, right)


def test_torchs_grouped_kernel_on_a_cpu_gives_what_products_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, counts = drawn(9, 4, dtype=torch.float32).detach(), torch.tensor([3, 0, 4])
    matrices = drawn(3, 4, 8, dtype=torch.float32).detach()
    taken = [
        grouped_mm(rows, counts, w)
        for w in (matrices, matrices.transpose(1, 2).contiguous().transpose(1, 2))
    ]
    assert experts._has_cpu_kernel(rows, matrices) and not experts._has_cpu_kernel(
        rows.double(), matrices.double()
    )
    monkeypatch.setattr(experts, "_has_cpu_kernel", lambda *_: False)
    one = grouped_mm(rows, counts, matrices)
    for found in taken:
        torch.testing.assert_close(found, one)
        assert not found[7:].any()


def test_an_order_that_is_kept_is_that_of_the_same_choices() -> None:
    """Not of choices that were written since, nor of others; and it is not kept longer than they live."""
    chosen = torch.tensor([[1, 0], [0, 1]])
    for _ in range(2):
        assert bags.order(chosen).tolist() == [1, 2, 0, 3]
    assert bags._last.get(chosen) is not None
    assert bags.order(chosen.clone().fill_(0)).tolist() == [0, 1, 2, 3]
    assert bags.order(chosen).tolist() == [1, 2, 0, 3]
    chosen[0, 0] = 0
    assert bags.order(chosen).tolist() == [0, 1, 2, 3]
    del chosen
    assert bags._last._order is None


def test_choices_made_in_inference_mode_are_sorted_each_time() -> None:
    """A model that is tried out by hand may run there; torch does not say whether such choices were written since."""
    with torch.inference_mode():
        chosen = torch.tensor([[1, 0], [0, 1]])
        rows, counts = route(torch.eye(2), chosen, 2)
        assert rows.argmax(1).tolist() == [0, 1, 0, 1] and counts.tolist() == [2, 2]
        chosen[0, 0] = 0
        assert bags.order(chosen).tolist() == [0, 1, 2, 3]
