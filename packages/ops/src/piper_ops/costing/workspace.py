"""Count the workspace of kernels, the bytes beside their arguments and results, on CUDA only if it is worth counting.

The bytes of the loss are for the reductions "mean" and "sum", which keep some bytes per row that "none" does not; in
bfloat16 an H200's allocator was asked for as many, to the byte (benchmarks/measured/gpu-check-h200-last.txt).
Attention's gradient counts the largest workspace among the lowerings that a device from sm80 on may choose. Two things
are not counted: workspace inside of aten's own ops, such as the sorted indices of an embedding's gradient, and the
buffers of reductions that are split over blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from piper_ops.attention import context, sdpa
from piper_ops.attention.lowering import LoweringName
from piper_ops.attention.sdpa_kernels import (
    KERNELS,
    LSE_ALIGNMENT,
    AttentionInputs,
    BackwardKernel,
    ForwardKernel,
    aligned_bias,
    cpu_mask,
)
from piper_ops.attention.windows import in_window
from piper_ops.costing.attention_lowerings import cuda_lowerings, lowering_of
from piper_ops.costing.costs import call_of
from piper_ops.costing.registry import Call
from piper_ops.experts import experts, rounds
from piper_ops.float8.products import float8_mm
from piper_ops.float8.quantise import SLICE, float8_cast, float8_scale
from piper_ops.ground.library import HALF, OP_KERNELS, accumulate_dtype
from piper_ops.pointwise import losses, norms, vocabulary


@dataclass(frozen=True, slots=True)
class Workspace:
    """Hold the bytes of a kernel's workspace: `always` + min(`sliced`, `most`), each affine in the rows of a batch."""

    always: int
    sliced: int = 0
    most: int = 0

    @property
    def bytes(self) -> int:
        return self.always + min(self.sliced, self.most)


def cuda_workspace(
    op: object,
    args_meta: Sequence[Any],
    out_meta: Any,
    kwargs_meta: Mapping[str, Any] | None = None,
) -> Workspace | None:
    """Return the workspace of the kernel of `op(*args_meta, **kwargs_meta) -> out_meta`; None if nothing is counted.

    Tensors are fake or real, with concrete shapes.
    """
    if not isinstance(op, torch._ops.OpOverload) or op not in _RULES:
        return None
    return _RULES[op](call_of(op, args_meta, out_meta, kwargs_meta or {}))


def cpu_workspace(
    op: object,
    args_meta: Sequence[Any],
    out_meta: Any,
    kwargs_meta: Mapping[str, Any] | None = None,
) -> int:
    """Return the workspace of an op's kernel on a CPU in bytes, 0 for an op that is not counted.

    Counted are a mask of attention in the form of torch's kernel, copies of tensors whose strides differ from the ones
    that kernels take or return, the buffers that sort and sum the rows of experts, and tensors of float8 and weights of
    layer norms in float32.
    """
    if not isinstance(op, torch._ops.OpOverload) or op not in _ON_CPU:
        return 0
    return _ON_CPU[op](call_of(op, args_meta, out_meta, kwargs_meta or {}))


def _attention_on_cpu(call: Call) -> int:
    """Count the mask, copies, and a second logsumexp, since the kernel gives it with the heads innermost."""
    return _math(call) if lowering_of(call, "cpu").fallback else _around(call, _Fused("cpu_flash"))


@dataclass(frozen=True, slots=True)
class _Fused:
    """Stand for a fused kernel of attention: make tensors with its results' shapes and strides, and compute nothing.

    Attributes:
        name: the kernel.
    """

    name: LoweringName

    def forward(self, given: AttentionInputs) -> tuple[Tensor, Tensor]:
        inside = self._inside(given, 0)
        out = self._result(given.q, self.name != "cuda_efficient", given.v.shape[3])
        logsumexp = self._logsumexp(given.q)
        del inside
        return out, logsumexp

    def backward(
        self, grad: Tensor, out: Tensor, lse: Tensor, given: AttentionInputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        inside = self._inside(given, _fused_dgrad(given, self.name))
        gq, gk, gv = (
            self._result(t, self.name in ("cuda_flash", "cuda_cudnn"), t.shape[3])
            for t in (given.q, given.k, given.v)
        )
        del inside
        return gq, gk, gv

    def _inside(self, given: AttentionInputs, own: int) -> tuple[Tensor | None, Tensor]:
        """Return the kernel's bias, and so many bytes of workspace beside it."""
        q, k, _, mask, *_ = given
        bias = aligned_bias(q, k, mask) if self.name == "cuda_efficient" else cpu_mask(mask, q)
        return bias, q.new_empty(own, dtype=torch.uint8)

    def _logsumexp(self, q: Tensor) -> Tensor:
        """Return a tensor [batch, heads, tokens]; a CPU's has the heads innermost in memory."""
        batch, heads, tokens, _ = q.shape
        dtype = accumulate_dtype(q.dtype)
        if self.name == "cpu_flash":
            return q.new_empty((batch, tokens, heads), dtype=dtype).transpose(1, 2)
        return q.new_empty((batch, heads, tokens), dtype=dtype)

    def _result(self, like: Tensor, alike: bool, dim: int) -> Tensor:
        """Return a tensor with the strides of `like`, or with the strides of the op's result."""
        batch, heads, tokens, _ = like.shape
        return (
            torch.empty_like(like)
            if alike
            else like.new_empty((batch, tokens, heads, dim)).transpose(1, 2)
        )


def _around(call: Call, kernel: _Fused) -> int:
    """Count the workspace of an attention op and its kernel by running them on meta tensors."""
    key = kernel, *call.args, *map(_form, call.args.values())
    if key not in _BYTES_INSIDE:
        _BYTES_INSIDE[key] = _run(call, kernel.name, kernel.forward, kernel.backward)
    return _BYTES_INSIDE[key]


def _run(call: Call, name: LoweringName, forward: ForwardKernel, backward: BackwardKernel) -> int:
    given = AttentionInputs(*(_on_meta(call.args[name]) for name in AttentionInputs._fields))
    if given.window:  # of devices that share tokens, the last one's windows have the most keys
        forward, backward = in_window(name, forward, backward)
        given = given._replace(place=given.degree - 1)
    if "grad_out" not in call.args:
        return peak_bytes_inside(sdpa.run_forward, forward, given)
    tensors = (_on_meta(call.args[name]) for name in ("grad_out", "out", "logsumexp"))
    return peak_bytes_inside(sdpa.run_backward, backward, *tensors, given)


def _rms_norm(call: Call) -> Workspace | None:
    return Workspace(copied) if (copied := _copied(call)) else None


def _layer_norm(call: Call) -> Workspace | None:
    """Count copies in half precision alone; in others a CPU makes the same ones, which both count."""
    return _rms_norm(call) if call.tensor("x").dtype in HALF else None


def _copied(call: Call) -> int:
    """Count the arguments of a norm that are copied first, because its kernels read dense ones."""
    tensors = [call.tensor(name) for name in ("grad_out", "x") if name in call.args]
    return sum(t.nbytes for t in tensors if not t.is_contiguous())


def _cross_entropy(call: Call) -> Workspace:
    """Count a slice of log-probabilities and the values picked from it, and the slices' losses, kept until the end.

    bfloat16 logits are converted to float32 before (CUDA's softmax converts float16 only), and then the peak is in the
    conversion.
    """
    logits = call.tensor("logits")
    tokens, classes = logits.shape
    item = accumulate_dtype(logits.dtype).itemsize
    if logits.dtype == torch.bfloat16:
        rows = (
            2 * item * classes - 8
        )  # without the slice's losses and logsumexps, which do not exist yet
        return _in_slices(logits, 4 * tokens - 4, rows)
    return _in_slices(logits, item * tokens, item * classes + 8 + item, item)


def _cross_entropy_dgrad(call: Call) -> Workspace:
    """Count per row its scale, whether it counts, and its index; beside these one slice.

    In half precision that is a slice of probabilities in float32 and the number that is subtracted at the targets, else
    the negated scales of a slice.
    """
    logits = call.tensor("logits")
    tokens, classes = logits.shape
    item = accumulate_dtype(logits.dtype).itemsize
    half = logits.element_size() < item
    return _in_slices(
        logits, (item + 1 + 8) * tokens + (item if half else 0), item * (classes if half else 1)
    )


def _cross_entropy_part(call: Call) -> Workspace:
    """Count a slice of powers and their largest logits; from 20 classes on earlier buffers per token are smaller."""
    logits = call.tensor("logits")
    return _in_slices(logits, 0, accumulate_dtype(logits.dtype).itemsize * (logits.shape[1] + 1))


def _cross_entropy_part_dgrad(call: Call) -> Workspace:
    """Count per row its scale, its target's place and the subtrahend there; in half precision a slice of powers."""
    logits = call.tensor("logits")
    tokens, classes = logits.shape
    item = accumulate_dtype(logits.dtype).itemsize
    return _in_slices(
        logits, (2 * item + 8) * tokens, item * classes if logits.element_size() < item else 0
    )


def _cross_entropy_joined(call: Call) -> Workspace:
    """Count two numbers per token beside the logsumexp, and which targets count; one is the loss for "none"."""
    statistics = call.tensor("statistics")
    tokens, item = statistics.shape[-1], statistics.element_size()
    if call.args["reduction"] == "none":
        return Workspace((item + 1) * tokens)
    return Workspace((2 * item + 1) * tokens - item)


def _embedding_part(call: Call) -> Workspace:
    """Count all of the kernel; it is per token."""
    return Workspace(_whole_kernel(vocabulary.embedding_part, call))


def _context_merge(call: Call) -> Workspace:
    """Count all of the kernel, which is Python."""
    return Workspace(_whole_kernel(context.context_merge, call))


def _embedding_part_dgrad(call: Call) -> Workspace:
    """Count the places of the numbers in a device's part. While these are computed, the table is not allocated yet."""
    return Workspace(8 * call.tensor("indices").numel())


def _whole_kernel(op: torch._ops.OpOverload, call: Call) -> int:
    return _bytes_inside(OP_KERNELS[op], call)


_BYTES_INSIDE: dict[tuple[Any, ...], int] = {}
"""The workspace of a call, by kernel and the forms of its arguments."""


def _bytes_inside(kernel: Callable[..., Any], call: Call) -> int:
    """Count the workspace of a kernel that is written in Python by running it on meta tensors.

    It depends on the forms of the arguments alone, and layers that are alike call with the same ones.
    """
    key = kernel, *map(_form, call.args.values())
    if key not in _BYTES_INSIDE:
        _BYTES_INSIDE[key] = peak_bytes_inside(kernel, *map(_on_meta, call.args.values()))
    return _BYTES_INSIDE[key]


def _form(value: Any) -> Any:
    """Return the shape, strides and dtype of a tensor, and other values as they are."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_form, value)) if isinstance(value, list | tuple) else value


def _room(op: torch._ops.OpOverload, call: Call) -> int:
    """Return the workspace of further rounds in bytes: they reserve all of it when they begin."""
    room: Sequence[int] = call.args["room"]
    result_bytes = 0 if op._schema.is_mutable else sum(t.nbytes for t in call.outs)
    return max(0, room[list(rounds.ROUNDS).index(op)] - result_bytes)


def _float8_cast(call: Call) -> Workspace:
    """Count a slice in float32; of several, its float8 form beside it."""
    x = call.tensor("x")
    item = accumulate_dtype(x.dtype).itemsize
    return Workspace(0, item * x.numel(), (item + 1) * SLICE)


def _float8_mm(call: Call) -> Workspace:
    """Count operands that are copied, because tensor cores read the first by rows and the second by columns."""
    a, b = call.tensor("a"), call.tensor("b")
    return Workspace(a.numel() * (a.stride(1) != 1) + b.numel() * (b.stride(0) != 1))


def _further(op: torch._ops.OpOverload) -> Callable[[Call], Workspace]:
    return lambda call: Workspace(_room(op, call))


def _routing_on_cpu(op: torch._ops.OpOverload) -> Callable[[Call], int]:
    """Return a function that counts the memory of an op's CPU kernel, which may be another kernel than on CUDA."""
    kernel = experts.CPU_KERNELS.get(op._schema.name.removeprefix("piper::"), OP_KERNELS[op])
    return lambda call: _bytes_inside(kernel, call)


def _routing(op: torch._ops.OpOverload) -> Callable[[Call], Workspace]:
    return lambda call: Workspace(_whole_kernel(op, call))


def _in_slices(logits: Tensor, always: int, row: int, more: int = 0) -> Workspace:
    """Return a workspace of `row` bytes for each row of a slice, `more` bytes, and `always`."""
    return Workspace(
        always,
        row * logits.shape[0] + more,
        row * losses.rows_per_slice("cuda", logits.shape[1]) + more,
    )


def _attention(call: Call) -> Workspace:
    """Count the mask of fused kernels, copies around them, and the workspace of a gradient."""
    of_lowerings = (
        _math(call) if name == "math" else _around(call, _Fused(name))
        for name in cuda_lowerings(call)
    )
    return Workspace(max(of_lowerings))


def _fused_dgrad(given: AttentionInputs, name: LoweringName) -> int:
    """Return the bytes of a fused attention backward's workspace; it has none on a CPU.

    FlashAttention-2 sums the gradient of the queries in float32, beside a float32 per row (torch's flash_api.cpp:
    dq_accum and softmax_d, of lengths rounded up to 128 and head_dims to 32 or 64). The efficient kernel does so in
    half precision; in float32 it first makes the product of the output and its gradient (torch's attention_backward.cu:
    delta). Gradients of grouped heads are made for each query head, by the efficient kernel of keys and values that
    were repeated.

    torch asks cuDNN how much it needs (MHA.cpp: get_workspace_size). Here an upper bound of the seen values is counted:
    all three gradients in float32 (an H200, cuDNN 9.19, 8 heads of 64, 256 tokens: of the 6,144 bytes per token by
    this, 6,104 with 4 and with 8 sequences, at most 4,100 with 2; benchmarks/measured/gpu-h200.json).
    """
    q, k, v, *_ = given
    batch, heads, queries, dim = q.shape
    item, rows, keys = q.element_size(), batch * heads, k.shape[2]
    repeated = rows * keys * (dim + v.shape[3]) * item if heads != k.shape[1] else 0
    if name == "cpu_flash":
        return 0
    if name == "cuda_cudnn":
        return 4 * rows * (queries * dim + keys * (dim + v.shape[3]))
    if name == "cuda_flash":
        return 4 * rows * _up(queries, 128) * (_up(dim, 32 if dim <= 128 else 64) + 1) + repeated
    summed = 4 * rows * queries * (v.shape[3] if item == 4 else dim)
    return summed + 4 * rows * (queries + _up(queries, LSE_ALIGNMENT)) + 2 * repeated


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _math(call: Call) -> int:
    """Count the workspace of attention written out in Python by running it on meta tensors."""
    return _run(call, "math", *KERNELS["math"])


def _on_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def peak_bytes_inside(function: Callable[..., Any], *args: Any) -> int:
    """Return the most bytes of tensors that `function(*args)` holds at once, beside its arguments and less its results.

    It sees tensors that pass the dispatcher, not the memory that an operator of torch's allocates inside.
    """
    live = Live(tree_leaves(args))
    with live:
        results = function(*args)
    own = {t.untyped_storage() for t in tree_leaves(results) if isinstance(t, Tensor)}
    return live.most - sum(s.nbytes() for s in own)


class Live(TorchDispatchMode):
    """Track the most bytes of storages that operators returned and that were alive at once; given ones do not count."""

    def __init__(self, given: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self._given = {t.untyped_storage()._cdata for t in given if isinstance(t, Tensor)}
        self._alive: WeakSet[Any] = WeakSet()
        self.most: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].is_meta and _is_in_place(func):
            return args[0]  # without content nothing changes, and torch takes long to find that
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._given:
                self._alive.add(leaf.untyped_storage())
        self.most = max(self.most, sum(s.nbytes() for s in self._alive))
        return result


@cache
def _is_in_place(func: torch._ops.OpOverload) -> bool:
    """Return whether an operator changes the content of its first argument alone, and returns it."""
    schema = func._schema
    if torch.Tag.inplace_view in func.tags or len(schema.returns) != 1:
        return False
    first, *others = (a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    return schema.name.endswith("_") and first and not any(others)


ROUTING = (
    *(
        experts.route,
        experts.route_dgrad,
        experts.unroute,
        experts.unroute_dgrad,
        experts.unroute_wgrad,
    ),
    *(rounds.experts_send, rounds.experts_home, rounds.experts_give, rounds.experts_take),
    *(rounds.experts_drop, rounds.experts_checked),
)
"""The ops that bring tokens to experts and back. All workspace of their kernels is per token."""
_RULES: dict[torch._ops.OpOverload, Callable[[Call], Workspace | None]] = {
    losses.cross_entropy: _cross_entropy,
    losses.cross_entropy_dgrad: _cross_entropy_dgrad,
    vocabulary.cross_entropy_part: _cross_entropy_part,
    vocabulary.cross_entropy_part_dgrad: _cross_entropy_part_dgrad,
    vocabulary.cross_entropy_joined: _cross_entropy_joined,
    vocabulary.embedding_part: _embedding_part,
    vocabulary.embedding_part_dgrad: _embedding_part_dgrad,
    context.context_merge: _context_merge,
    sdpa.attention: _attention,
    sdpa.attention_dgrad: _attention,
    float8_cast: _float8_cast,
    float8_mm: _float8_mm,
    **{op: _rms_norm for op in (norms.rms_norm, norms.rms_norm_dgrad, norms.rms_norm_wgrad)},
    **{op: _layer_norm for op in norms.LAYER_NORMS},
    **{op: _routing(op) for op in ROUTING},
    **{op: _further(op) for op in rounds.ROUNDS},
}
_ON_CPU: dict[torch._ops.OpOverload, Callable[[Call], int]] = {
    sdpa.attention: _attention_on_cpu,
    sdpa.attention_dgrad: _attention_on_cpu,
    **{
        op: partial(_bytes_inside, OP_KERNELS[op])
        for op in (*norms.LAYER_NORMS, float8_scale, float8_cast, float8_mm)
    },
    **{op: _routing_on_cpu(op) for op in ROUTING},
    **{op: partial(_room, op) for op in rounds.ROUNDS},
}
"""The ops whose workspace is counted on a CPU. CUDA devices copy tensors with other strides, too."""
