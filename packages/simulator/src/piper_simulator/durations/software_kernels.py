"""Say which kernels a software stack runs for the kernels of a plan's step.

A plan has a kernel for each operator of the model. Software joins them, or adds some:

    accumulate = "product"   a weight's gradient is added to its sum by the product that makes it (Megatron-LM,
                             --gradient-accumulation-fusion): no kernel of its own adds it. The end of each of its
                             tiles reads and writes the sum, behind the tile's FLOPs. In a backward that is one
                             graph, these are the additions that are not of 16 bit
    runs = "fused"           a run of element-wise kernels between other kernels is one kernel. Tensors between
                             them stay in registers, so that it reads and writes as much as the largest of them (of
                             the ones of 16 bit, if there are any: float32 is for tensors inside). Kernels of a plan
                             that Inductor made are not joined any more, nor are sums of a weight's gradients. A
                             softmax is a kernel with its neighbours before it forward, and behind it backward; dropout
                             beside it is one of its own. The scale of a tensor in float8 ends a run. The kernels of
                             a router, with a top-k among them or its gradient's scatter, are launched each
    joined                   queries, keys and values are one product, and gate and up, between which an activation
                             may stand: their input gradients are one tensor, and no kernels add them up
    passes                   an operator, or one of a step ("W.add"), moves more or fewer bytes than the plan counts;
                             none, if its factor is 0
    loss_bytes               a cross-entropy moves so many bytes per logit
    fills                    the results of such kernels are written twice: with deterministic algorithms torch fills
                             uninitialized memory of at::empty (torch.utils.deterministic.fill_uninitialized_memory)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import prod

from piper_ir.ground.sizes import bind
from piper_ir.program.program import Kernel, Step
from piper_simulator.cluster.device import FLOAT8
from piper_simulator.cluster.stacks import Stack

_SOFTMAX = frozenset({"_softmax", "_softmax_backward_data"})
_DROPOUT = "native_dropout"
_ROUTER = frozenset({"topk", "scatter"})
_SCALE = "float8_scale"
QUANTISERS = frozenset({_SCALE, "float8_cast", "amin"})
"""The operators that make a tensor in float8 of one in 16 bit, among them the minimum for a scale."""
FILL, SUM = "fill", "sum of a product"
INSIDE = frozenset({FILL, SUM})
"""The names of kernels that no launch of their own starts."""
FUSION = "fusion"
"""The name of kernels that Inductor made for a plan, each of which is launched."""
HALF = frozenset({"bfloat16", "float16"})


def run_kernels(stack: Stack, kernels: Sequence[Kernel], step: Step) -> Sequence[Kernel]:
    """Return the kernels that a stack runs for the kernels of a step."""
    if stack.runs == "fused" and step == "R" and all(k.kind == "elementwise" for k in kernels):
        return ()  # made again in the registers of the backward's kernels
    sums: list[Kernel] = []
    if stack.accumulate == "product":
        added = [_adds_gradient(k, step) for k in kernels]
        sums = [_sum_of_product(k) for k, own in zip(kernels, added, strict=True) if own]
        kernels = [k for k, own in zip(kernels, added, strict=True) if not own]
    if stack.joined and step != "B":  # whose neighbours are products of I and W in turn
        kernels = list(_joined_products(kernels, step))
    if stack.loss_bytes or stack.passes:
        counted = (_as_counted(stack, k, step) for k in kernels)
        kernels = [k for k in counted if k is not None]
    if stack.runs == "fused":
        kernels = list(_fused(stack, kernels, step))
    kernels = [*kernels, *sums]
    if stack.fills:
        kernels = [k for one in kernels for k in (*_fill(stack, one, step), one)]
    return kernels


def _is_forward(step: Step) -> bool:
    return step in ("F", "R")


def _adds_gradient(kernel: Kernel, step: Step) -> bool:
    """Return whether a kernel adds the gradient of a weight to its sum."""
    narrow = kernel.dtype in HALF
    return kernel.op == "add" and (step == "W" or (step == "B" and not narrow))


def _as_counted(stack: Stack, kernel: Kernel, step: Step) -> Kernel | None:
    """Return a kernel with the bytes that the stack's facts say; None if the stack has no such kernel."""
    if kernel.kind == "loss" and stack.loss_bytes and len(kernel.dims) == 2:
        rows, classes = (bind(d, 0) for d in kernel.dims)
        each = stack.loss_bytes[not _is_forward(step)]
        return replace(kernel, bytes=round(rows * classes * each))
    factor = stack.passes.get(f"{step}.{kernel.op}", stack.passes.get(kernel.op))
    if factor is None:
        return kernel
    return replace(kernel, bytes=round(bind(kernel.bytes, 0) * factor)) if factor else None


def _sum_of_product(add: Kernel) -> Kernel:
    """Return the bytes, as a kernel, that a product moves beside its own if it adds its result to a sum.

    The kernel `add` reads and writes the sum and reads a gradient of 16 bit, which the other product has written.
    """
    return replace(add, bytes=max(0, bind(add.bytes, 0) - 4 * bind(add.flops, 0)), op=SUM)


def _fill(stack: Stack, kernel: Kernel, step: Step) -> Iterator[Kernel]:
    """Yield the kernel that fills the results of another one, if the stack does that.

    Of attention these are as large as the queries forward, and backward as the gradients of queries, keys and values.
    A norm reads one tensor and writes one, and backward reads two; the gradients of its weights are small.
    """
    if kernel.kind not in stack.fills or (kernel.kind == "norm" and step == "W"):
        return
    backward = not _is_forward(step)
    item = 4 if kernel.dtype == "float32" else 2
    if kernel.kind == "norm":
        nbytes = bind(kernel.bytes, 0) // (3 if backward else 2)
    elif kernel.kind == "matmul":
        *outer, _ = (bind(d, 0) for d in kernel.dims)
        nbytes = item * prod(outer)
    else:
        rows, heads, queries, keys, width = (bind(d, 0) for d in kernel.dims)
        nbytes = item * rows * heads * width * (queries + 2 * keys if backward else queries)
    yield Kernel("elementwise", (), kernel.dtype, 0, nbytes, kernel.count, op=FILL)


@dataclass
class _Product:
    """Collect neighbouring products that a stack joins, and the element-wise kernels beside them.

    Attributes:
        kernel: the products as one.
        parts: how many they are.
        sums: the kernels that added up their results, which one product gives at once.
        before, behind: further kernels, from before its last part and from behind it.
    """

    kernel: Kernel
    parts: int
    sums: int = 0
    before: list[Kernel] = field(default_factory=list)
    behind: list[Kernel] = field(default_factory=list)

    def joins(self, other: Kernel, free: int, step: Step, follower: Kernel | None) -> bool:
        """Return whether another product belongs to them, given the kernel that follows it.

        One activation may stand between, or its gradient: then a product with it follows, or the sum of both results.
        So may casts of the operands to float8.
        """
        if not _fits(self.kernel, other, free):
            return False
        between = [
            k for k in self.behind if not _adds_gradient(k, step) and not _quantises(self.kernel, k)
        ]
        gate = "mul" if _is_forward(step) else "add"
        gated = follower is not None and follower.op == gate and not self.before
        return not between or (gated and sum(k.count for k in between) == 1)

    def join(self, other: Kernel, count: int, free: int) -> None:
        """Add `count` further products, given as one."""
        self.kernel, self.parts = _with(self.kernel, other, free), self.parts + count
        self.before, self.behind = [*self.before, *self.behind], []

    def follow(self, kernel: Kernel, step: Step) -> None:
        """Add an element-wise kernel behind them, unless it adds up their input gradients."""
        gone = 0
        if step == "I" and kernel.op == "add" and kernel.dtype in HALF:
            gone = min(kernel.count, self.parts - 1 - self.sums)
            self.sums += gone
        if gone < kernel.count:
            self.behind.append(replace(kernel, count=kernel.count - gone))

    def run(self, step: Step) -> Iterator[Kernel]:
        """Yield the kernels: the further ones behind the product in a forward, and before it in a backward."""
        yield from () if _is_forward(step) else self.before
        yield self.kernel
        yield from (*self.before, *self.behind) if _is_forward(step) else self.behind


def _quantises(product: Kernel, kernel: Kernel) -> bool:
    """Return whether a kernel makes an operand of a product in float8."""
    return product.dtype == FLOAT8 and kernel.op in QUANTISERS


def _joined_products(kernels: Sequence[Kernel], step: Step) -> Iterator[Kernel]:
    """Yield the kernels with neighbouring products as one, if they differ in the dimension that is joined.

    That is the columns of the results forward, the inner dimension of input gradients, the rows of weight gradients.
    Of weight gradients the first behind a norm is that of the product at the end of a block, which stays alone.
    """
    free = {"I": 2, "W": 0}.get(step, 1)
    open_: _Product | None = None
    ends = step == "W"
    for kernel, follower in zip_longest(kernels, kernels[1:]):
        if kernel.kind == "matmul" and len(kernel.dims) == 3:
            if ends:
                yield replace(kernel, count=1)
                kernel, ends = replace(kernel, count=kernel.count - 1), False
            each = _times(kernel, free)
            if not kernel.count:
                continue
            if open_ is not None and open_.joins(each, free, step, follower):
                open_.join(each, kernel.count, free)
                continue
            if open_ is not None:
                yield from open_.run(step)
            open_ = _Product(each, kernel.count)
        elif open_ is None or kernel.kind != "elementwise":
            if open_ is not None:
                yield from open_.run(step)
            open_, ends = None, ends or (step == "W" and kernel.kind != "elementwise")
            yield kernel
        else:
            open_.follow(kernel, step)
    if open_ is not None:
        yield from open_.run(step)


def _times(kernel: Kernel, free: int) -> Kernel:
    """Return equal products as one."""
    dims = tuple(bind(d, 0) * (kernel.count if k == free else 1) for k, d in enumerate(kernel.dims))
    flops, moved = (bind(x, 0) * kernel.count for x in (kernel.flops, kernel.bytes))
    return replace(kernel, dims=dims, flops=flops, bytes=moved, count=1)


def _with(before: Kernel, after: Kernel, free: int) -> Kernel:
    """Return two products as one."""
    pairs = enumerate(zip(before.dims, after.dims, strict=True))
    return replace(
        after,
        dims=tuple(bind(a, 0) + bind(b, 0) if k == free else b for k, (a, b) in pairs),
        flops=bind(before.flops, 0) + bind(after.flops, 0),
        bytes=bind(before.bytes, 0) + bind(after.bytes, 0),
    )


def _fits(before: Kernel, after: Kernel, free: int) -> bool:
    """Return whether two products agree in all dimensions but the one that is joined."""
    return all(
        a == b for k, (a, b) in enumerate(zip(before.dims, after.dims, strict=True)) if k != free
    )


def _fused(stack: Stack, kernels: Iterable[Kernel], step: Step) -> Iterator[Kernel]:
    """Yield the kernels with each run of element-wise ones as one kernel; none with sums of gradients."""
    run: list[Kernel] = []
    for kernel in kernels:
        joins = kernel.kind == "elementwise" or kernel.kind in stack.fused
        joins = joins and kernel.op != FUSION and not _adds_gradient(kernel, step)
        if run and (not joins or _apart(run[-1], kernel)):
            yield from _joined(run)
            run = []
        if joins:
            run.append(kernel)
        else:
            yield kernel
    yield from _joined(run)


def _apart(before: Kernel, after: Kernel) -> bool:
    """Return whether no stack joins two kernels: a softmax and a dropout, or the scale of a tensor and its use."""
    first, second = before.op, after.op
    return (
        first == _SCALE
        or (first in _SOFTMAX and second.startswith(_DROPOUT))
        or (first.startswith(_DROPOUT) and second in _SOFTMAX)
    )


def _joined(run: Sequence[Kernel]) -> Iterator[Kernel]:
    """Yield a run as kernels: if an operator is there k times, the k-th is the largest of the k-th ones of each."""
    if any(k.op in _ROUTER for k in run):
        yield from run
        return
    by_op: dict[str, list[Kernel]] = {}
    for kernel in [k for k in run if k.dtype in HALF] or run:
        by_op.setdefault(kernel.op, []).extend([replace(kernel, count=1)] * kernel.count)
    ranked = [sorted(each, key=_moved, reverse=True) for each in by_op.values()]
    for kth in zip_longest(*ranked):
        yield max((k for k in kth if k is not None), key=_moved)


def _moved(kernel: Kernel) -> int:
    return bind(kernel.bytes, 0)
