"""Count the kernels that eager torch launches for operators that are one node of a plan.

This is `Stack.lowering` "torch": passes over their elements, and kernels on a few numbers per row. All numbers are read
from the code, nothing is fitted:

    piper_ops/losses.py                 cross-entropy works through slices of the rows in float32 (float64)
    torch, native/cuda/SoftMax.cu       a row that does not fit a block's shared memory is read three times: maximum,
                                        sum, result
    torch, native/SoftMax.cpp           bfloat16 is converted to float32 by a kernel of its own, float16 within the
                                        softmax
    torch, native/cuda/layer_norm_kernel.cu   the gradients of input and of weights come from two kernels; both read x
                                        and the gradient

    torch, native/cuda/ScanUtils.cuh    a running sum along any dimension but the last has one thread per column, which
                                        loads an element after the other; numbers of another dtype are converted first
    torch, native/cuda/TensorTopK.cu    the chosen are picked by one kernel and sorted by another
    torch, native/cuda/ScatterGatherKernel.cu, native/TensorAdvancedIndexing.cpp   a scatter writes into a copy

The second and the third reading of a row count as bytes of memory: they come from the second-level cache at best, which
is hardly faster. So does each load of a running sum: which cache answers it is not known.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from piper_ir.ground.sizes import ITEM_BYTES, bind
from piper_ir.program.program import Kernel

SLICE = 2**24
"""The logits that cross-entropy handles at once on a CUDA device (SLICE_ELEMENTS of piper_ops.pointwise.losses)."""
SHARED_BYTES, REDUCTION_BYTES = 48 * 1024, 32 * 4
"""The shared memory that a block has without asking, and the part that a reduction over its 32 warps takes."""
VECTOR_BYTES = 16
"""The bytes that a thread loads at once; a row that is no multiple of it is not kept in shared memory."""
WARP_CLASSES = 1024
"""The number of classes, at most 4 KiB, up to which one warp keeps a row in registers."""


@dataclass(frozen=True, slots=True)
class Launched:
    """Count the kernels behind one kernel of a plan.

    Attributes:
        moved: (bytes, how many kernels that move so many).
        small: kernels whose bytes do not count.
        loads: loads of which each waits for the one before it.
    """

    moved: tuple[tuple[int, int], ...]
    small: int = 0
    loads: int = 0

    @property
    def count(self) -> int:
        """Count all kernels."""
        return self.small + sum(n for _, n in self.moved)


def launched_by_torch(kernel: Kernel) -> Launched:
    """Return the kernels behind one kernel of a plan; by default the kernel itself."""
    nbytes = bind(kernel.bytes, 0)
    if kernel.op in _LOSSES and len(kernel.dims) == 2:
        rows, classes = (bind(d, 0) for d in kernel.dims)
        return _LOSSES[kernel.op](rows, classes, kernel.dtype)
    if kernel.op in SCANS and len(kernel.dims) == 3:
        return _scan(kernel, nbytes)
    if kernel.op in _SMALL:
        return Launched(((nbytes, 1),), _SMALL[kernel.op])
    if kernel.op == "layer_norm_backward":  # its bytes: x, gradient and result
        return Launched(((nbytes, 1), (nbytes * 2 // 3, 1)))
    return Launched(((nbytes, 1),))


def _scan(kernel: Kernel, nbytes: int) -> Launched:
    """Count the kernels of a running sum along the second of three dimensions."""
    outer, length, inner = (bind(d, 0) for d in kernel.dims)
    converted = nbytes != 2 * outer * length * inner * ITEM_BYTES[kernel.dtype]
    return Launched(((nbytes, 1),), int(converted), length if inner > 1 else 0)


def _cross_entropy(rows: int, classes: int, dtype: str) -> Launched:
    """Count the kernels of a cross-entropy.

    Per slice: log-softmax; loss, clamp, two gathers, difference. Of several slices, whose losses are not reduced, each
    also sets the sum of weights to zero; then two cat, two sums, comparison and division."""
    slices = _slices(rows, classes)
    small = 6 * len(slices) + 6 if len(slices) > 1 else 5
    return _over(slices, classes, _softmax(classes, dtype), small)


def _cross_entropy_dgrad(rows: int, classes: int, dtype: str) -> Launched:
    """Count the kernels of the gradient of a cross-entropy.

    First comparison, sum, division, a zero, choice and clamp, of one number per row. A slice in 16 bit: difference to
    the logsumexp, exp, one subtracted at the target (two small kernels), product with the scale.
    Else softmax, product, the scale subtracted at the target (two)."""
    item, wide = _items(dtype)
    slices = _slices(rows, classes)
    small = 6 + 2 * len(slices)
    if item == 2:
        return _over(slices, classes, (item + wide, 2 * wide, wide + item), small)
    return _over(slices, classes, (*_softmax(classes, dtype), 2 * wide), small)


def _softmax(classes: int, dtype: str) -> tuple[int, ...]:
    """Return the bytes per logit of the kernels of a softmax in float32 or float64."""
    item, wide = _items(dtype)
    if dtype == "bfloat16":
        return item + wide, (_reads(classes, wide) + 1) * wide
    return (_reads(classes, item) * item + wide,)


def _reads(classes: int, item: int) -> int:
    in_registers = classes <= WARP_CLASSES and classes * item <= 4 * WARP_CLASSES
    shared = (
        classes < (SHARED_BYTES - REDUCTION_BYTES) // item and classes * item % VECTOR_BYTES == 0
    )
    return 1 if in_registers or shared else 3


def _items(dtype: str) -> tuple[int, int]:
    """Return the bytes of a logit, and of a number of the arithmetic."""
    return ITEM_BYTES[dtype], 8 if dtype == "float64" else 4


def _slices(rows: int, classes: int) -> tuple[int, ...]:
    most = max(1, SLICE // max(1, classes))
    return tuple(min(most, rows - k * most) for k in range(max(1, ceil(rows / most))))


def _over(
    slices: tuple[int, ...], classes: int, per_logit: tuple[int, ...], small: int
) -> Launched:
    """Count each of these kernels, by its bytes per logit, on each slice."""
    counts = {rows: slices.count(rows) for rows in dict.fromkeys(slices)}
    return Launched(
        tuple((rows * classes * each, n) for each in per_logit for rows, n in counts.items()), small
    )


def _cross_entropy_part(rows: int, classes: int, dtype: str) -> Launched:
    """Count the kernels of a device's part of a cross-entropy.

    First 21 that look for the targets' places, and four that pick logits there. Per slice: maximum, difference, exp,
    sum; a comparison, a choice, logarithm and sum of one number per row, and a conversion in 16 bit."""
    item, wide = _items(dtype)
    slices = _slices(rows, classes)
    return _over(
        slices,
        classes,
        (item, item + wide, 2 * wide, wide),
        25 + (5 if item < wide else 4) * len(slices),
    )


def _cross_entropy_part_dgrad(rows: int, classes: int, dtype: str) -> Launched:
    """Count the kernels of the gradient: 21 that look for places, two for the subtrahend there, five for the scale.

    Per slice: difference to the logsumexp, exp, one subtracted at the target, product with the scale."""
    item, wide = _items(dtype)
    slices = _slices(rows, classes)
    return _over(slices, classes, (item + wide, 2 * wide, wide + item), 28 + len(slices))


_LOSSES = {
    "cross_entropy": _cross_entropy,
    "cross_entropy_dgrad": _cross_entropy_dgrad,
    "cross_entropy_part": _cross_entropy_part,
    "cross_entropy_part_dgrad": _cross_entropy_part_dgrad,
}
SCANS = frozenset({"cumsum", "cumprod"})
"""The operators that go through a dimension one element after the other."""
_SMALL = {
    "embedding_part": 19,
    "embedding_part_dgrad": 19,
    "cross_entropy_joined": 8,
    "topk": 1,
    "scatter": 1,
}
"""The small kernels beside the one that moves an op's bytes: they look for places, or make one loss of many."""
