"""List the functions that a captured graph may not call.

They decompose differently on each device, or depend on the strategy. The targets are the ones that Dynamo puts into a
graph (torch 2.11 to 2.13): a module such as nn.LSTM shows as torch.lstm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx


@dataclass(frozen=True, slots=True)
class Refusal:
    """Hold the reason to refuse a call, and the way out.

    Attributes:
        reason: completes "<op>: ".
        way_out: a sentence of its own.
        parameters: the names of the function's parameters, by position.
        applies: takes the arguments by name and says whether this call is meant; without it every call is.
        everywhere: the call is refused also if it would stay as it is (in an opaque region), since it trains another
            model or belongs to the strategy.
    """

    reason: str
    way_out: str
    parameters: tuple[str, ...] = ()
    applies: Callable[[Mapping[str, Any]], bool] | None = None
    everywhere: bool = False

    def meets(self, node: fx.Node) -> bool:
        """Return whether the refusal is meant for this call."""
        if self.applies is None:
            return True
        bound = dict(zip(self.parameters, node.args, strict=False)) | node.kwargs
        return self.applies(bound)


_ATTENTION_BLOCK = Refusal(
    "the fused attention of inference is another kernel on every device, and has no gradient",
    "Call nn.MultiheadAttention, which is captured as it is, or F.scaled_dot_product_attention.",
)
_RNN = Refusal(
    "fused recurrent layers are one cuDNN kernel on CUDA and a loop on CPU",
    "Make it a module of its own (nn.LSTM), which then runs by autograd as it is, or call it inside `with "
    "piper.region(opaque=True):`.",
)
_STATISTICS = Refusal(
    "batch statistics make every row depend on the whole microbatch, so that a split batch trains another model",
    'Job(batch_norm="microbatch") takes the statistics of each microbatch on its replica, as '
    "gradient accumulation in plain PyTorch does. Other models that a plan trains as one device does: LayerNorm, "
    "RMSNorm or GroupNorm in its place, or the module in eval mode, with its running statistics.",
)
_BATCH_NORM = Refusal(
    _STATISTICS.reason,
    _STATISTICS.way_out,
    ("input", "running_mean", "running_var", "weight", "bias", "training"),
    lambda bound: bound.get("training", False) is not False or bound.get("running_mean") is None,
    everywhere=True,
)
_TORCH_BATCH_NORM = Refusal(
    _STATISTICS.reason,
    _STATISTICS.way_out,
    ("input", "weight", "bias", "running_mean", "running_var", "training"),
    _BATCH_NORM.applies,
    everywhere=True,
)
_INSTANCE_NORM = Refusal(
    "running averages of an instance norm make every row depend on the rows before it",
    "Leave them out, as nn.InstanceNorm2d does unless it is told otherwise: track_running_stats=False.",
    ("input", "running_mean"),
    lambda bound: bound.get("running_mean") is not None,
)
_TORCH_INSTANCE_NORM = Refusal(
    _INSTANCE_NORM.reason,
    _INSTANCE_NORM.way_out,
    ("input", "weight", "bias", "running_mean"),
    _INSTANCE_NORM.applies,
)
_NATIVE_NORM = Refusal(
    "its statistics have another dtype on every device, and its backward gives input and weight gradients in one "
    "kernel",
    "Call F.layer_norm.",
)
_CTC = Refusal(
    "ctc_loss is a cuDNN kernel on CUDA for some inputs only",
    "Let the model compute it, in a small nn.Module that gets the labels and the lengths as tensors: this module "
    "then runs by autograd as it is.",
)
_MULTILABEL_MARGIN = Refusal(
    "torch's tracing of it counts the padding of targets (-1), also under torch.compile: another loss than in eager mode",
    "Let the model compute it, in a small nn.Module under `with piper.region(opaque=True):`, or take "
    "F.multilabel_soft_margin_loss.",
)
_AUTOCAST = Refusal(
    "autocast inside the model: its casts of parameters would be saved for every microbatch",
    "Remove it and say so in the job: Job(precision=Precision(params='float32', compute='bfloat16')); "
    "autocast(enabled=False) may stay.",
    ("device_type", "dtype", "enabled", "cache_enabled"),
    lambda bound: bound.get("enabled", True) is not False,
    everywhere=True,
)

REFUSALS: Mapping[object, Refusal] = {
    F.multi_head_attention_forward: _ATTENTION_BLOCK,
    torch._native_multi_head_attention: _ATTENTION_BLOCK,
    torch._transformer_encoder_layer_fwd: _ATTENTION_BLOCK,
    **dict.fromkeys(
        (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu, torch.lstm_cell, torch.gru_cell),
        _RNN,
    ),
    F.batch_norm: _BATCH_NORM,
    torch.batch_norm: _TORCH_BATCH_NORM,
    torch.native_batch_norm: _TORCH_BATCH_NORM,
    F.instance_norm: _INSTANCE_NORM,
    torch.instance_norm: _TORCH_INSTANCE_NORM,
    torch.native_layer_norm: _NATIVE_NORM,
    F.ctc_loss: _CTC,
    torch.ctc_loss: _CTC,
    F.multilabel_margin_loss: _MULTILABEL_MARGIN,
    torch._C._nn.multilabel_margin_loss: _MULTILABEL_MARGIN,
    torch.amp.autocast_mode._enter_autocast: _AUTOCAST,
}
"""The refusal of each call target."""
