"""Define piper::route, piper::grouped_mm and piper::unroute: experts that take every token that chose them.

    rows, counts = route(x, chosen, experts)      # a row for each choice, sorted by expert, then by token
    out = grouped_mm(rows, counts, weight)        # each expert's rows times its matrix
    y = unroute(out, chosen, share)               # for each token the sum of share x row over its choices

All shapes are known before anything runs: each of N tokens chooses k experts, so there are N k rows, however many each
expert gets. The order is that of a stable sort, so that equal choices give equal results to the bit. An expert without
rows has zeros as its gradient. A buffer may be larger than needed: rows behind the last expert's are zero in every
result and give nothing to a gradient, while torch's own grouped product leaves them as they were.

The sums of `unroute` are in float32 for half precision. On CUDA, products in bfloat16 are torch's grouped kernel, if
its sizes allow; else there is a product per expert, and the host waits for the counts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from piper_ops.experts import bags
from piper_ops.ground.errors import UnsupportedVariant
from piper_ops.ground.library import (
    DIRECT,
    FLOATS,
    LIBRARY,
    accumulate_dtype,
    contiguous_empty,
    define,
)

ALIGNED = 8
"""The multiple of elements of bfloat16 that torch's grouped kernel needs of a row: 16 bytes."""


def _check_choices(op: str, tokens: int | torch.SymInt, chosen: Tensor) -> None:
    if chosen.dim() != 2 or chosen.shape[0] != tokens or chosen.dtype != torch.int64:
        raise UnsupportedVariant(
            f"{op}: chosen {tuple(chosen.shape)} of {chosen.dtype} is not (N, k) of int64 with a row for each of "
            f"the tokens"
        )


def _check_route(x: Tensor, chosen: Tensor, experts: int) -> None:
    if x.dim() != 2 or x.dtype not in FLOATS:
        raise UnsupportedVariant(
            f"route: x {tuple(x.shape)} of {x.dtype} is not (N, W) of a floating-point dtype"
        )
    if experts < 1:
        raise UnsupportedVariant(f"route: experts={experts}; there must be one at least")
    _check_choices("route", x.shape[0], chosen)


def _check_unroute(rows: Tensor, chosen: Tensor, share: Tensor) -> None:
    if rows.dim() != 2 or rows.dtype not in FLOATS:
        raise UnsupportedVariant(
            f"unroute: rows {tuple(rows.shape)} of {rows.dtype} are not (N k, W) of a floating-point dtype"
        )
    _check_choices("unroute", share.shape[0], chosen)
    if (
        share.shape != chosen.shape
        or share.dtype not in FLOATS
        or rows.shape[0] != chosen.shape[0] * chosen.shape[1]
    ):
        raise UnsupportedVariant(
            f"unroute: rows {tuple(rows.shape)} and share {tuple(share.shape)} do not fit chosen "
            f"{tuple(chosen.shape)}: there is a row and a share for each choice"
        )


def _check_grouped(rows: Tensor, counts: Tensor, weight: Tensor) -> None:
    fits = rows.dim() == 2 and weight.dim() == 3 and rows.shape[1] == weight.shape[1]
    if not fits or rows.dtype not in FLOATS or rows.dtype != weight.dtype:
        raise UnsupportedVariant(
            f"grouped_mm: rows {tuple(rows.shape)} of {rows.dtype} and weight {tuple(weight.shape)} of "
            f"{weight.dtype} are not (M, K) and (E, K, N) of one floating-point dtype"
        )
    if counts.dim() != 1 or counts.shape[0] != weight.shape[0] or counts.dtype != torch.int64:
        raise UnsupportedVariant(
            f"grouped_mm: counts {tuple(counts.shape)} of {counts.dtype} are not int64, one for each of the "
            f"{weight.shape[0]} experts"
        )


# --- choices and their places


def _sorted_choices(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the experts of all choices in the order of the rows, and the number of each row's choice."""
    expert, choice = torch.sort(chosen.reshape(-1), stable=True)
    return expert, choice


def _places(chosen: Tensor) -> Tensor:
    """Return the row [N, k] of each choice."""
    choice = _sorted_choices(chosen)[1]
    place = torch.empty_like(choice)
    place[choice] = torch.arange(choice.shape[0], device=choice.device)
    return place.view(chosen.shape)


def _refuse_unknown(chosen: Tensor, experts: int) -> None:
    """Fail for an expert that does not exist, without waiting for the GPU."""
    torch._assert_async(~((chosen < 0) | (chosen >= experts)).any())


def _route_fake(x: Tensor, chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    _check_route(x, chosen, experts)
    rows = chosen.shape[0] * chosen.shape[1]
    return contiguous_empty(x, (rows, x.shape[1])), contiguous_empty(chosen, (experts,))


def _route_picked(x: Tensor, chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    _refuse_unknown(chosen, experts)
    expert, choice = _sorted_choices(chosen)
    first = torch.searchsorted(expert, torch.arange(experts + 1, device=expert.device))
    del expert
    return x.index_select(0, choice.floor_divide_(chosen.shape[1])), first.diff()


def _route_dgrad_fake(grad: Tensor, chosen: Tensor) -> Tensor:
    return contiguous_empty(grad, (chosen.shape[0], grad.shape[1]))


def _route_dgrad_picked(grad: Tensor, chosen: Tensor) -> Tensor:
    """Return for each token the sum of its rows, in the order of its choices."""
    place, dtype = _places(chosen), accumulate_dtype(grad.dtype)
    total = grad.index_select(0, place[:, 0]).to(dtype)
    for k in range(1, chosen.shape[1]):
        total += grad.index_select(0, place[:, k])
    return total.to(grad.dtype)


def _unroute_fake(rows: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
    _check_unroute(rows, chosen, share)
    return contiguous_empty(rows, (chosen.shape[0], rows.shape[1]))


def _unroute_picked(rows: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
    place, dtype = _places(chosen), accumulate_dtype(rows.dtype)
    share = share.to(dtype)
    total = rows.index_select(0, place[:, 0]) * share[:, :1]
    for k in range(1, chosen.shape[1]):
        total += rows.index_select(0, place[:, k]) * share[:, k : k + 1]
    return total.to(rows.dtype)


def _unroute_dgrad_fake(grad: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
    return contiguous_empty(grad, (chosen.shape[0] * chosen.shape[1], grad.shape[1]))


def _unroute_dgrad_picked(grad: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
    """Return for each row its token's gradient times its share."""
    choice = _sorted_choices(chosen)[1]
    share = share.reshape(-1).index_select(0, choice).to(accumulate_dtype(grad.dtype)).unsqueeze(1)
    return (grad.index_select(0, choice.floor_divide_(chosen.shape[1])) * share).to(grad.dtype)


def _unroute_wgrad_fake(grad: Tensor, chosen: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    return contiguous_empty(chosen, chosen.shape, dtype)


def _unroute_wgrad_picked(grad: Tensor, chosen: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return for each share the product of its token's gradient and its row."""
    place, wide = _places(chosen), accumulate_dtype(grad.dtype)
    result = torch.empty(chosen.shape, dtype=dtype, device=grad.device)
    for k in range(chosen.shape[1]):
        result[:, k] = (grad * rows.index_select(0, place[:, k])).sum(1, dtype=wide)
    return result


CPU_KERNELS: dict[str, Callable[..., Any]] = {
    "route": bags.route,
    "route_dgrad": lambda grad, *rest: (
        bags.route_dgrad if bags.takes(grad) else _route_dgrad_picked
    )(grad, *rest),
    "unroute": lambda rows, chosen, share: (
        bags.unroute if bags.takes(rows, share) else _unroute_picked
    )(rows, chosen, share),
    "unroute_dgrad": lambda grad, chosen, share: (
        bags.unroute_dgrad if bags.takes(grad, share) else _unroute_dgrad_picked
    )(grad, chosen, share),
    "unroute_wgrad": lambda grad, chosen, rows, dtype: (
        bags.unroute_wgrad
        if grad.dtype == dtype and bags.takes(grad, rows)
        else _unroute_wgrad_picked
    )(grad, chosen, rows, dtype),
}
"""The kernels of a CPU by the name of the op; on meta tensors they have the same workspace as on a CPU."""


def _by_device(name: str, elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that calls the op's CPU kernel on a CPU, and `elsewhere` on other devices."""
    on_cpu = CPU_KERNELS[name]
    return lambda first, *rest: (on_cpu if first.device.type == "cpu" else elsewhere)(first, *rest)


# --- products


def sizes_of(counts: Tensor, rows: int) -> list[int]:
    """Return how many rows each expert has, and how many are behind them; the host waits for the counts of a GPU."""
    sizes: list[int] = counts.tolist()
    behind = rows - sum(sizes)
    if behind < 0:
        raise IndexError(
            f"grouped_mm: the counts add up to {sum(sizes)}, and there are {rows} rows"
        )
    return [*sizes, behind]


def has_kernel(*tensors: Tensor) -> bool:
    """Return whether torch's grouped kernel takes these tensors: one of the last two dimensions must be dense."""
    return all(
        t.is_cuda
        and t.dtype == torch.bfloat16
        and t.shape[-1] % ALIGNED == 0
        and t.shape[-2] > 0
        and 1 in t.stride()[-2:]
        for t in tensors
    )


def _has_cpu_kernel(rows: Tensor, weight: Tensor) -> bool:
    """Return whether torch's grouped kernel takes these on a CPU; there it calls one product after the other."""
    dense = rows.is_contiguous() and rows.shape[0] > 0 and 1 in weight.stride()[-2:]
    sizes = (rows.shape[1], weight.shape[2])
    return (
        rows.device.type == "cpu"
        and rows.dtype == torch.float32
        and dense
        and not any(n == 0 or n % 4 for n in sizes)
    )


def _grouped_fake(rows: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    _check_grouped(rows, counts, weight)
    return contiguous_empty(rows, (rows.shape[0], weight.shape[2]))


def _grouped_kernel(rows: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    if has_kernel(rows, weight) and weight.shape[1] % ALIGNED == 0:
        ends = counts.cumsum(0, dtype=torch.int32)
        product: Tensor = torch._grouped_mm(rows.contiguous(), weight, offs=ends)
        behind = torch.arange(rows.shape[0], device=rows.device) >= ends[-1]
        return product.masked_fill_(behind.unsqueeze(1), 0)
    sizes = sizes_of(counts, rows.shape[0])
    if _has_cpu_kernel(rows, weight):
        # Not an operator's result: a number per expert on the host is no memory of the step, here as in a list.
        ends = torch.frombuffer(array("i", accumulate(sizes[:-1])), dtype=torch.int32)
        cpu_product: Tensor = torch._grouped_mm(rows, weight, offs=ends)
        if sizes[-1]:
            cpu_product[-sizes[-1] :].zero_()
        return cpu_product
    output = rows.new_empty((rows.shape[0], weight.shape[2]))
    *results, behind = output.split_with_sizes(sizes)
    for x, matrix, result in zip(
        rows.split_with_sizes(sizes), weight.unbind(), results, strict=False
    ):
        if x.shape[0]:
            torch.mm(x, matrix, out=result)
    behind.zero_()
    return output


def _grouped_dgrad_fake(grad: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    return contiguous_empty(grad, (grad.shape[0], weight.shape[1]))


def _grouped_dgrad_kernel(grad: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    return _grouped_kernel(grad, counts, weight.transpose(1, 2))


def _grouped_wgrad_fake(rows: Tensor, counts: Tensor, grad: Tensor) -> Tensor:
    return contiguous_empty(rows, (counts.shape[0], rows.shape[1], grad.shape[1]))


def wgrad_kernel(rows: Tensor, counts: Tensor, grad: Tensor) -> Tensor:
    if has_kernel(rows, grad):
        ends = counts.cumsum(0, dtype=torch.int32)
        product: Tensor = torch._grouped_mm(rows.contiguous().t(), grad.contiguous(), offs=ends)
        return product.masked_fill_((counts == 0).view(-1, 1, 1), 0)
    gradients, sizes = (
        rows.new_empty((counts.shape[0], rows.shape[1], grad.shape[1])),
        sizes_of(counts, rows.shape[0]),
    )
    for x, above, result in zip(
        rows.split_with_sizes(sizes), grad.split_with_sizes(sizes), gradients.unbind(), strict=False
    ):
        if x.shape[0]:
            torch.mm(x.t(), above, out=result)
        else:
            result.zero_()
    return gradients


def _grouped_wgrad_add(rows: Tensor, counts: Tensor, grad: Tensor, total: Tensor) -> Tensor:
    sizes = sizes_of(counts, rows.shape[0])
    columns = rows.t().split_with_sizes(sizes, 1)
    for x, above, result in zip(
        columns, grad.split_with_sizes(sizes), total.unbind(), strict=False
    ):
        if x.shape[1]:
            result.addmm_(x, above)
    return total


# --- gradients of autograd


def _route_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[1])


def _route_backward(
    ctx: Any, grad: Tensor | None, of_counts: Tensor | None
) -> tuple[Tensor | None, ...]:
    (chosen,) = ctx.saved_tensors
    return (None if grad is None else route_dgrad(grad, chosen)), None, None


def _unroute_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _unroute_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, chosen, share = ctx.saved_tensors
    wants_rows, _, wants_share = ctx.needs_input_grad
    of_rows = unroute_dgrad(grad, chosen, share) if wants_rows else None
    return of_rows, None, unroute_wgrad(grad, chosen, rows, share.dtype) if wants_share else None


def _grouped_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, counts, weight = ctx.saved_tensors
    wants_rows, _, wants_weight = ctx.needs_input_grad
    of_rows = grouped_mm_dgrad(grad, counts, weight) if wants_rows else None
    return of_rows, None, grouped_mm_wgrad(rows, counts, grad) if wants_weight else None


route_dgrad = define(
    "route_dgrad",
    "(Tensor grad, Tensor chosen) -> Tensor",
    _route_dgrad_fake,
    _by_device("route_dgrad", _route_dgrad_picked),
    direct=True,
)
"""An op that returns the gradient (N, W) of the tokens, given the gradient of the rows."""
route = define(
    "route",
    "(Tensor x, Tensor chosen, int experts) -> (Tensor, Tensor)",
    _route_fake,
    _by_device("route", _route_picked),
    check=_check_route,
    direct=True,
    backward=_route_backward,
    setup_context=_route_setup,
)
"""An op that takes tokens (N, W) and the experts (N, k) that each chose, and returns rows (N k, W) and counts (E,).

A row is a token's copy for one of its choices. Rows are sorted by expert, then by token, then by choice; `counts` says
how many rows each expert has.
"""
unroute_dgrad = define(
    "unroute_dgrad",
    "(Tensor grad, Tensor chosen, Tensor share) -> Tensor",
    _unroute_dgrad_fake,
    _by_device("unroute_dgrad", _unroute_dgrad_picked),
    direct=True,
)
"""An op that returns the gradient (N k, W) of the rows."""
unroute_wgrad = define(
    "unroute_wgrad",
    "(Tensor grad, Tensor chosen, Tensor rows, ScalarType dtype) -> Tensor",
    _unroute_wgrad_fake,
    _by_device("unroute_wgrad", _unroute_wgrad_picked),
    direct=True,
)
"""An op that returns the gradient (N, k) of the shares, in `dtype`."""
unroute = define(
    "unroute",
    "(Tensor rows, Tensor chosen, Tensor share) -> Tensor",
    _unroute_fake,
    _by_device("unroute", _unroute_picked),
    check=_check_unroute,
    direct=True,
    backward=_unroute_backward,
    setup_context=_unroute_setup,
)
"""An op that takes the rows (N k, W) of all choices and the share (N, k) of each, and returns (N, W).

A token's result is the sum of share x row over its choices, in the dtype of the rows. The shares' dtype may differ.
"""
grouped_mm_dgrad = define(
    "grouped_mm_dgrad",
    "(Tensor grad, Tensor counts, Tensor weight) -> Tensor",
    _grouped_dgrad_fake,
    _grouped_dgrad_kernel,
    direct=True,
)
"""An op that returns the gradient (M, K) of the rows."""
grouped_mm_wgrad = define(
    "grouped_mm_wgrad",
    "(Tensor rows, Tensor counts, Tensor grad) -> Tensor",
    _grouped_wgrad_fake,
    wgrad_kernel,
    direct=True,
)
"""An op that returns the gradient (E, K, N) of the matrices: zeros for an expert without rows."""
LIBRARY.define(
    "grouped_mm_wgrad_(Tensor rows, Tensor counts, Tensor grad, Tensor(a!) total) -> Tensor(a!)"
)
for _key in ("CPU", "CUDA"):
    LIBRARY.impl("grouped_mm_wgrad_", _grouped_wgrad_add, _key)
grouped_mm_wgrad_ = torch.ops.piper.grouped_mm_wgrad_.default
DIRECT[grouped_mm_wgrad_] = _grouped_wgrad_add
"""The kernel that adds the gradient of the matrices to `total`; an expert without rows adds nothing."""
grouped_mm = define(
    "grouped_mm",
    "(Tensor rows, Tensor counts, Tensor weight) -> Tensor",
    _grouped_fake,
    _grouped_kernel,
    check=_check_grouped,
    direct=True,
    backward=_grouped_backward,
    setup_context=_grouped_setup,
)
"""An op that takes rows (M, K), the counts (E,) of each expert and its matrices (E, K, N), and returns (M, N).

The first counts[0] rows are multiplied by the first matrix, and so on. Rows behind them all are zero.
"""
