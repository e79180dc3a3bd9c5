"""Cast tensors of a batch in mixed precision where plain PyTorch under autocast does: in products and in losses.

This restates the rule of docs/precision.md and shares no code with Piper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_OF_PRODUCTS = (
    "linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d matmul rmatmul mm bmm mv dot "
    "einsum addmm baddbmm scaled_dot_product_attention multi_head_attention_forward layer_norm rms_norm group_norm "
    "batch_norm instance_norm prelu embedding_bag"
)
_PRODUCTS = frozenset(_OF_PRODUCTS.split())
"""The functions that autocast runs in the compute dtype, and norms, whose weights have it."""
_OF_LOSSES = (
    "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss kl_div poisson_nll_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits"
)
_LOSSES = frozenset(_OF_LOSSES.split())
"""The functions of an output and a floating-point target, which autocast runs in the wider dtype."""


class MixedCasts(TorchFunctionMode):
    """Give products their activations in the narrowest of their dtypes, and losses theirs in the widest.

    Everything else promotes by torch's rules, so that a label meets an output without being rounded. Parameters are
    never cast: a layer that is kept in a wider dtype asks the model for a cast, as it does in Piper.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch with one dtype where it needs one."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        if name in _PRODUCTS or name in _LOSSES:
            found = {t.dtype for t in pytree.tree_leaves((args, kwargs)) if _floating(t)}
            if len(found) > 1:
                one = (min if name in _PRODUCTS else max)(found, key=lambda d: torch.finfo(d).bits)
                args, kwargs = pytree.tree_map(lambda leaf: _in(one, leaf), (args, kwargs))
        return func(*args, **kwargs)


def _floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _in(dtype: torch.dtype, leaf: Any) -> Any:
    return leaf.to(dtype) if _floating(leaf) and not isinstance(leaf, nn.Parameter) else leaf
