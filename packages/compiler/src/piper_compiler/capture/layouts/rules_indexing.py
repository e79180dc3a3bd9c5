"""Say how ops loop that make tensors out of nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from piper_compiler.capture._torch import OpOverload
from piper_compiler.capture.layouts.loops import Loops, OpCall, Shape

aten = torch.ops.aten


def _made(call: OpCall) -> Loops:
    """Return the loops of an op that fills a tensor with one number: each element by itself."""

    def localize(call: OpCall, results: Sequence[Shape]) -> Mapping[str, Any]:
        return {"size": list(results[0])}

    return Loops(localize=localize)


RULES: dict[OpOverload, Callable[[OpCall], Loops]] = {
    aten.zeros.default: _made,
    aten.ones.default: _made,
    aten.full.default: _made,
}
