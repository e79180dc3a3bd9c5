"""Say how the ops loop that dispatch tokens to experts, multiply them there, and combine the results.

Rows are sorted by expert, and the number of rows of each expert is known to a run only, so rows and experts cannot be
sharded. Elements and hidden units can, so that an expert is sharded along its hidden units (tensor parallelism): its
second product is a partial sum then, and stays one until the results are combined, with a row for each token and not
for each of its choices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import piper_ops  # noqa: F401 - registers the ops
from piper_capture.layouts.loops import Loops, OpCall
from piper_capture.layouts.rules.letters import OUT, all_whole, each, lettered
from piper_capture.torch_api._torch import OpOverload

piper = torch.ops.piper
ROWS, COUNTS, MATRICES = (None, "element"), (None,), (None, "element", "column")
BIASES = (None, "element")
CHOICES = (None, None)


def _route_dgrad(call: OpCall) -> Loops:
    return lettered({0: ROWS, 1: CHOICES, OUT: ROWS}, linear=each(0))


def _product(call: OpCall) -> Loops:
    names = {0: ROWS, 1: COUNTS, 2: MATRICES, OUT: (None, "column")}
    return lettered(names, summed=("element",), linear=each(0, 2))


def _product_dgrad(call: OpCall) -> Loops:
    names = {0: (None, "column"), 1: COUNTS, 2: MATRICES, OUT: ROWS}
    return lettered(names, summed=("column",), linear=each(0, 2))


def _product_wgrad(call: OpCall) -> Loops:
    return lettered({0: ROWS, 1: COUNTS, 2: (None, "column"), OUT: MATRICES}, linear=each(0, 2))


def _bias(call: OpCall) -> Loops:
    """Return the loops of rows plus biases; partial sums of the rows are added up before, each bias is added once."""
    return lettered({0: ROWS, 1: COUNTS, 2: BIASES, OUT: ROWS}, linear=(frozenset({0, 2}),))


def _bias_wgrad(call: OpCall) -> Loops:
    return lettered({0: ROWS, 1: COUNTS, OUT: BIASES}, linear=each(0))


def _unroute(call: OpCall) -> Loops:
    """Return the loops of the sums over choices, or of the gradient of their rows: elements can be sharded."""
    return lettered({0: ROWS, 1: CHOICES, 2: CHOICES, OUT: ROWS}, linear=each(0, 2))


def _unroute_wgrad(call: OpCall) -> Loops:
    return lettered(
        {0: ROWS, 1: CHOICES, 2: ROWS, OUT: CHOICES}, summed=("element",), linear=each(0, 2)
    )


ROUTE, UNROUTE = piper.route.default, piper.unroute.default
UNROUTE_WGRAD = piper.unroute_wgrad.default
RULES: dict[OpOverload, Callable[[OpCall], Loops]] = {
    piper.route.default: all_whole,
    piper.route_dgrad.default: _route_dgrad,
    piper.grouped_mm.default: _product,
    piper.grouped_mm_dgrad.default: _product_dgrad,
    piper.grouped_mm_wgrad.default: _product_wgrad,
    piper.grouped_add.default: _bias,
    piper.grouped_add_wgrad.default: _bias_wgrad,
    piper.unroute.default: _unroute,
    piper.unroute_dgrad.default: _unroute,
    UNROUTE_WGRAD: _unroute_wgrad,
}
GROUPED_ADD = piper.grouped_add.default
BY_EXPERT = frozenset(RULES)
"""The operators that sort tokens by expert, compute their rows, and bring them back."""
