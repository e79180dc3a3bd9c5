"""The simulator counts what Piper's operators run: every kernel of cross-entropy and its gradient, seen by a dispatch
mode."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from piper_ir.program.program import Kernel
from piper_ops.pointwise import losses
from piper_simulator.durations import eager_launches

CLASSES = 64
ALLOCATES = {"empty", "new_empty"}
PICKS = {"gather", "scatter_add_", "nll_loss_forward"}
"""They touch one class of each row."""


class Seen(TorchDispatchMode):
    """Name, and bytes read and written, of each kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = list[tuple[str, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name, kwargs = (
            func(*args, **(kwargs or {})),
            func.overloadpacket.__name__,
            kwargs or {},
        )
        views = any(
            r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
        )
        if not views and name not in ALLOCATES:
            given = [*args, *(v for k, v in kwargs.items() if k != "out")]
            read = {"copy_": given[1:], "new_full": []}.get(name, given)
            tensors = [t for t in tree_leaves((read, out)) if isinstance(t, Tensor)]
            self.kernels.append((name, sum(t.nbytes for t in tensors)))
        return out


def seen(call: Callable[[], object]) -> list[tuple[str, int]]:
    with Seen() as mode:
        call()
    return mode.kernels


@pytest.mark.parametrize("rows", [4, 12, 14])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_cross_entropy_makes_the_passes_that_are_counted(
    dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one slice, in three, and in four of which the last is smaller. On a CPU too a softmax is one call, and short
    rows are read once; setting a sum to zero is a kernel of CUDA's within the loss, one per slice where there are
    several."""
    monkeypatch.setitem(losses.SLICE_ELEMENTS, "cpu", 4 * CLASSES)
    monkeypatch.setattr(eager_launches, "SLICE", 4 * CLASSES)
    logits, target = torch.randn(rows, CLASSES, dtype=dtype), torch.randint(CLASSES, (rows,))
    loss, lse = losses._cross_entropy_kernel(logits, target)
    kernels = {
        "cross_entropy": seen(lambda: losses._cross_entropy_kernel(logits, target)),
        "cross_entropy_dgrad": seen(
            lambda: losses._dgrad_kernel(loss, logits, target, lse)
        ),  # any gradient of the loss
    }
    for op, found in kernels.items():
        kernel = Kernel("loss", (rows, CLASSES), str(dtype).removeprefix("torch."), 0, 0, op=op)
        counted = eager_launches.launched_by_torch(kernel)
        expected = Counter[int]()
        for nbytes, n in counted.moved:
            expected[nbytes] += n
        least = min(b for b, _ in counted.moved) // 2
        over = Counter(
            b // CLASSES * CLASSES for name, b in found if b > least and name not in PICKS
        )  # without numbers per row
        assert over == expected, (op, found)
        zeroed = -(-rows // 4) if op == "cross_entropy" and rows > 4 else 0
        assert len(found) - over.total() + zeroed == counted.small, (op, found)


def test_the_slice_is_the_operators() -> None:
    assert losses.SLICE_ELEMENTS["cuda"] == eager_launches.SLICE
