"""What kernels hold inside on CUDA: formulas against kernels that run here, against an H200's allocator, and by
hand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from piper_ops import (
    attention,
    attention_dgrad,
    cross_entropy,
    cross_entropy_dgrad,
    layer_norm,
    layer_norm_backward,
    layer_norm_dgrad,
    layer_norm_wgrad,
    rms_norm,
)
from piper_ops.attention import sdpa
from piper_ops.attention.sdpa_kernels import KERNELS, AttentionInputs
from piper_ops.costing.attention_lowerings import is_written_on_cpu
from piper_ops.costing.workspace import (
    Workspace,
    cpu_workspace,
    cuda_workspace,
    peak_bytes_inside,
)
from piper_ops.ground.library import OP_KERNELS
from piper_ops.pointwise import losses
from tests.helpers.cases import each_case

CLASSES, SLICE = 50, 1000
MEASURED = (
    Path(__file__).resolve().parents[3] / "benchmarks" / "measured" / "gpu-check-h200-last.txt"
)


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Slices of 20 rows, here as on CUDA."""
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(losses.SLICE_ELEMENTS, device, SLICE)
    yield


def bytes_of(own: Workspace | None) -> int:
    assert own is not None
    return own.bytes


def loss_bytes(rows: int, dtype: torch.dtype, reduction: str) -> list[tuple[int, int]]:
    """(by formula, held here) of cross-entropy and of its gradient."""
    logits, target = torch.randn(rows, CLASSES).to(dtype), torch.arange(rows) % CLASSES
    loss, lse = cross_entropy(logits, target, reduction)
    forward, backward = (
        (logits, target, reduction),
        (torch.ones_like(loss), logits, target, lse, reduction),
    )
    return [
        (
            bytes_of(cuda_workspace(cross_entropy, forward, (loss, lse))),
            peak_bytes_inside(OP_KERNELS[cross_entropy], *forward),
        ),
        (
            bytes_of(cuda_workspace(cross_entropy_dgrad, backward, logits)),
            peak_bytes_inside(OP_KERNELS[cross_entropy_dgrad], *backward),
        ),
    ]


@pytest.mark.usefixtures("small_slices")
@each_case("reduction", ["mean", "sum"])
@each_case("dtype", [torch.float64, torch.float32, torch.bfloat16])
@each_case("rows", [10, 20, 40, 100])
def test_the_loss_holds_what_its_formula_says(
    rows: int, dtype: torch.dtype, reduction: str
) -> None:
    (forward, held), dgrad = loss_bytes(rows, dtype, reduction)
    assert dgrad[0] == dgrad[1]
    # of more than one slice, the formula leaves out what the last one's picked logits take
    missing = 0 if dtype == torch.bfloat16 or rows <= 20 else dtype.itemsize * 19
    assert held - forward == missing


@pytest.mark.usefixtures("small_slices")
def test_a_loss_in_slices_does_not_grow_with_its_rows_beyond_a_few_bytes_each() -> None:
    few, many = (loss_bytes(rows, torch.bfloat16, "mean")[1][0] for rows in (40, 400))
    assert many - few == 360 * 13


def test_the_gradient_of_the_loss_took_as_much_on_an_h200() -> None:
    """Each of six models of `make gpu-check` asked the allocator for so much more than the plan that knew tensors
    alone; they have 4,096 or 8,192 tokens per microbatch and 32,768 classes."""
    found = re.findall(
        r"(\d) x 1024 tokens.*: peak memory .* predicted (\d+) bytes, the allocator was asked for "
        r"(\d+)",
        MEASURED.read_text(),
    )
    assert len(found) == 6
    for sequences, planned, asked in found:
        tokens = 1024 * int(sequences)
        logits = torch.empty(tokens, 32_768, dtype=torch.bfloat16, device="meta")
        own = cuda_workspace(
            cross_entropy_dgrad, (logits.sum(), logits, logits.new_empty(tokens), None), logits
        )
        assert own == Workspace(13 * tokens + 4, 4 * 32_768 * tokens, 64 << 20)
        assert own.bytes == int(asked) - int(planned)


def shapes(
    dtype: torch.dtype, length: int, heads: int, kv_heads: int, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(2, length, heads, dim).to(dtype),
        torch.randn(2, length, kv_heads, dim).to(dtype),
        torch.randn(2, length, kv_heads, dim).to(dtype),
    )


@each_case("kv_heads", [4, 2])
@each_case("causal", [True, False])
def test_written_out_attention_holds_what_it_holds_here(kv_heads: int, causal: bool) -> None:
    """No fused kernel takes float64."""
    q, k, v = shapes(torch.float64, 8, 4, kv_heads, 6)
    forward, backward = KERNELS["math"]
    given = AttentionInputs(q, k, v, None, causal)
    out, lse = sdpa.run_forward(forward, given)
    both = (out, q, k, v, out, lse, None, causal, None)
    here = (
        peak_bytes_inside(sdpa.run_forward, forward, given),
        peak_bytes_inside(sdpa.run_backward, backward, out, out, lse, given),
    )
    formulas = (
        cuda_workspace(attention, given, (out, lse)),
        cuda_workspace(attention_dgrad, both, (q, k, v)),
    )
    assert tuple(map(bytes_of, formulas)) == here
    assert min(here) > 2 * 4 * 8 * 8 * 8, "at least a T x T matrix"


@each_case(
    ("dtype", "length", "kv_heads", "dim", "wanted"),
    [
        # 2 sequences of 4 heads; cuDNN: three gradients in float32
        (torch.bfloat16, 128, 4, 64, 4 * 8 * 128 * 3 * 64),
        # cuDNN takes no head_dim above 128; lengths and head_dims that FlashAttention rounds up, and a number per row
        (torch.bfloat16, 100, 4, 136, 4 * 8 * 128 * (192 + 1)),
        # grouped heads: cuDNN is not chosen; gradients of keys and values of every query head, in bfloat16
        (torch.bfloat16, 128, 2, 64, 4 * 8 * 128 * (64 + 1) + 2 * 8 * 128 * (64 + 64)),
        # the efficient kernel in float32: the product of output and gradient, a number per row, and the padded
        # logsumexp
        (torch.float32, 100, 4, 64, 4 * 8 * 100 * 64 + 4 * 8 * (100 + 128)),
    ],
)
def test_the_gradient_of_attention_by_hand(
    dtype: torch.dtype, length: int, kv_heads: int, dim: int, wanted: int
) -> None:
    q, k, v = shapes(dtype, length, 4, kv_heads, dim)
    lse = torch.empty(2, 4, length)
    assert cuda_workspace(
        attention_dgrad, (q, q, k, v, q, lse, None, True), (q, k, v)
    ) == Workspace(wanted)
    assert cuda_workspace(attention, (q, k, v, None, True), (q, lse)) == Workspace(0)


def test_other_ops_have_no_memory_of_their_own_that_is_counted() -> None:
    x = torch.randn(4)
    assert cuda_workspace(torch.ops.aten.add.Tensor, (x, x), x) is None


MASKS = {
    "none": None,
    "bool": torch.ones(40, 40, dtype=torch.bool).tril(),
    "bool per row": torch.ones(2, 1, 40, 40, dtype=torch.bool),
    "bool per head": torch.ones(4, 40, 40, dtype=torch.bool),
    "float32": torch.zeros(40, 40),
}


@each_case("name", MASKS)
@each_case("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_mask_made_for_the_kernel_is_counted_on_a_cpu(name: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 40, 4, 16).to(dtype) for _ in range(3))
    mask = MASKS[name]
    out, lse = OP_KERNELS[attention](q, k, v, mask)
    forward, backward = (q, k, v, mask), (out, q, k, v, out, lse, mask)
    needs = mask is not None and (mask.dtype == torch.bool or dtype == torch.float64)
    wanted = mask.numel() * dtype.itemsize if mask is not None and needs else 0
    assert cpu_workspace(attention_dgrad, backward, (q, k, v)) == wanted
    assert peak_bytes_inside(OP_KERNELS[attention_dgrad], *backward) == wanted
    until_the_end = mask is not None and mask.dtype == torch.bool
    assert (
        cpu_workspace(attention, forward, (out, lse))
        == peak_bytes_inside(OP_KERNELS[attention], *forward)
        == (wanted + lse.nbytes if until_the_end else max(wanted, lse.nbytes))
    ), "the logsumexp is made contiguous"


@each_case(
    ("dtype", "value_dim", "written"),
    [
        (
            torch.bfloat16,
            8,
            True,
        ),  # latent attention: flash for CPUs has one head_dim, the efficient kernel two
        (torch.bfloat16, 16, False),
        (torch.float64, 8, False),  # written out on both
    ],
)
def test_attention_that_only_a_cpu_writes_out(
    dtype: torch.dtype, value_dim: int, written: bool
) -> None:
    q, k = (torch.empty(2, 8, 4, 16, dtype=dtype, device="meta") for _ in range(2))
    v = torch.empty(2, 8, 4, value_dim, dtype=dtype, device="meta")
    assert is_written_on_cpu(attention, (q, k, v), (v, v)) is written
    assert not is_written_on_cpu(torch.ops.aten.add.Tensor, (q, k), q)


@each_case(("keys", "padded"), [(40, 48), (64, 64)])
def test_the_efficient_kernel_on_cuda_reads_a_bias_in_rows_of_16(keys: int, padded: int) -> None:
    q, k = torch.empty(2, 8, 4, 16, device="meta"), torch.empty(2, keys, 4, 16, device="meta")
    mask = torch.ones(8, keys, dtype=torch.bool, device="meta")
    out, lse = torch.empty(2, 8, 4, 16, device="meta"), torch.empty(2, 4, 8, device="meta")
    own = cuda_workspace(attention, (q, k, k, mask), (out, lse))
    assert own == Workspace(8 * keys * 4 + 8 * padded * 4)


def laid_out(how: str, heads: int) -> Tensor:
    """A tensor [2, 8, heads, 4], dense or with its heads or elements before its tokens in memory."""
    order = {"dense": (0, 1, 2, 3), "heads": (0, 2, 1, 3), "elements": (0, 3, 1, 2)}[how]
    whole = torch.randn(2, 8, heads, 4, dtype=torch.float64)
    return whole.permute(order).contiguous().permute([order.index(d) for d in range(4)])


@each_case("how", ["dense", "heads", "elements"])
@each_case("kv_heads", [2, 1])
def test_copies_around_attention_are_counted_on_a_cpu(how: str, kv_heads: int) -> None:
    q, k, v = (laid_out(how, heads) for heads in (2, kv_heads, kv_heads))
    forward = (q, k, v, None, True)
    out, lse = OP_KERNELS[attention](*forward)
    backward = (laid_out(how, 2), q, k, v, out, lse, None, True)
    own = cpu_workspace(attention, forward, (out, lse))
    assert own == peak_bytes_inside(OP_KERNELS[attention], *forward)
    assert cpu_workspace(attention_dgrad, backward, (q, k, v)) == peak_bytes_inside(
        OP_KERNELS[attention_dgrad], *backward
    )
    copied = {"dense": 0, "heads": q.nbytes, "elements": q.nbytes + k.nbytes + v.nbytes}[how]
    assert own == max(copied, lse.nbytes), "of copied tensors, or of two logsumexps"


def test_attention_that_a_cpu_writes_out_is_counted() -> None:
    """torch's kernel takes no values of another size than keys."""
    q, k, v = torch.randn(2, 8, 2, 4), torch.randn(2, 8, 2, 4), torch.randn(2, 8, 2, 6)
    out, lse = OP_KERNELS[attention](q, k, v)
    own = cpu_workspace(attention, (q, k, v), (out, lse))
    assert own == peak_bytes_inside(OP_KERNELS[attention], q, k, v) > 2 * 2 * 8 * 8 * 4


@each_case("norm", [layer_norm, rms_norm])
def test_norms_copy_what_is_not_dense(norm: torch._ops.OpOverload) -> None:
    dense, apart = torch.randn(3, 5, 4), torch.randn(3, 4, 5).transpose(1, 2)
    options = ([4], None, None, 1e-5) if norm is layer_norm else ([4], None, 1e-5)
    asked = (
        cpu_workspace
        if norm is layer_norm
        else lambda *call: bytes_of(cuda_workspace(*call) or Workspace(0))
    )
    assert asked(norm, (dense, *options), norm(dense, *options)) == 0
    assert asked(norm, (apart, *options), norm(apart, *options)) == apart.nbytes


NORM_MASKS = ([True, True], [True, False], [False, True])


@each_case("dense", [True, False])
@each_case("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_layer_norms_hold_on_a_cpu_what_is_counted(dtype: torch.dtype, dense: bool) -> None:
    """The count is exact: in half precision a CPU's kernels copy weights to float32, and those of CUDA do not."""
    x = torch.randn(3, 5, 6) if dense else torch.randn(3, 6, 5).transpose(1, 2)
    x, shape, half = x.to(dtype), [6], dtype.itemsize == 2
    weight, bias = torch.randn(2, 6).to(dtype)
    _, mean, rstd = OP_KERNELS[layer_norm](x, shape, weight, bias, 1e-5)
    stats = x, x, shape, mean, rstd
    calls: list[tuple[torch._ops.OpOverload, tuple[object, ...]]] = [
        (layer_norm, (x, shape, weight, bias, 1e-5)),
        (layer_norm, (x, shape, None, None, 1e-5)),
        (layer_norm_dgrad, (*stats, weight)),
        *[(layer_norm_wgrad, (*stats, dtype, mask)) for mask in NORM_MASKS],
        *[(layer_norm_backward, (*stats, weight, mask)) for mask in NORM_MASKS],
    ]
    for op, args in calls:
        own = cpu_workspace(op, args, op(*args))
        assert own == peak_bytes_inside(OP_KERNELS[op], *args), op
        assert own >= (4 * 6 if half else 0)
        assert is_written_on_cpu(op, args, op(*args)) is half
        on_cuda = cuda_workspace(op, args, op(*args))
        assert (
            on_cuda is None if dense or not half else bytes_of(on_cuda) in (x.nbytes, 2 * x.nbytes)
        )
