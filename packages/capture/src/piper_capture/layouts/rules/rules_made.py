"""Say how ops loop that make tensors out of numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from piper_capture.layouts.loops import Loops, OpCall
from piper_capture.layouts.rules.letters import all_whole
from piper_capture.layouts.rules.rules_views import takes_shape
from piper_capture.torch_api._torch import OpOverload
from piper_ops import float8_past_scale

aten = torch.ops.aten


def _filled(call: OpCall) -> Loops:
    """Return the loops of an op that fills a tensor with one number: each element by itself."""
    return Loops(localize=takes_shape("size"))


def _single(call: OpCall) -> Loops:
    return Loops()


RULES: dict[OpOverload, Callable[[OpCall], Loops]] = {
    aten.zeros.default: _filled,
    aten.ones.default: _filled,
    aten.full.default: _filled,
    aten.empty.memory_format: _filled,
    aten.new_zeros.default: _filled,
    aten.new_ones.default: _filled,
    aten.new_full.default: _filled,
    aten.new_empty.default: _filled,
    aten.scalar_tensor.default: _single,
    float8_past_scale: _single,
    **dict.fromkeys(
        (aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default),
        all_whole,
    ),
    **dict.fromkeys((aten.eye.default, aten.eye.m), all_whole),
}
