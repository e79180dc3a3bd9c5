"""Faults in float8: in how layers are chosen and quantised, which no plan shows. tests/faults/mutants.py tries them.

The judge's emulation is its own (piper.api.reference.reference_float8). Each fault has sizes that no other job has, so
that no capture with a fault is taken for another one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

import piper
from piper import Float8, Mesh, Precision, Strategy, models, recipes, where
from piper_capture.trace import float8_layers
from piper_ops.float8 import recipes as float8_recipes
from piper_ops.float8.recipes import ALL, E4M3, Float8Recipe, QuantisedOperand
from tests.faults.job_faults import JobFault, Judged
from tests.faults.sharer_faults import exchanging
from tests.helpers import parity
from tests.helpers.compositions import Composition

MICROBATCHES = 2


def _judged(
    vocab: int,
    recipe: str,
    fault: AbstractContextManager[Any],
    running: AbstractContextManager[Any] | None = None,
    tp: int = 1,
) -> Judged:
    """A small decoder that was compiled with one fault and has run with another."""
    sizes = models.DecoderConfig(layers=1, width=32, heads=2, hidden=48, vocab=vocab, length=16)
    precision = Precision(params="float64", float8=Float8(recipe, keep=("head",)))
    job = models.job(sizes, global_batch=2 * MICROBATCHES, precision=precision)
    pieces = (
        recipes.tensor_parallel() if tp > 1 else (),
        piper.split(where(), microbatches=MICROBATCHES),
    )
    with patch.dict(os.environ, PIPER_CACHE=""), fault:
        compiled = piper.compile(job, Strategy(Mesh(tp=tp), pieces))
    with running or nullcontext():
        run = piper.execute(
            compiled, steps=parity.STEPS, launcher="inline", gradients=True, memory=False
        )
    return run, parity.reference(job, replicas=1, microbatches=MICROBATCHES)


def _recipe(name: str, change: Callable[[Float8Recipe], Float8Recipe]) -> Any:
    table = float8_recipes.RECIPES
    return patch.dict(table, {name: change(table[name])})


def gradient_in_e4m3(c: Composition) -> Judged:
    """Gradients of outputs have e4m3's few exponents in place of e5m2's."""

    def narrowed(recipe: Float8Recipe) -> Float8Recipe:
        (grad, weight), wgrad = recipe.dgrad, recipe.wgrad
        assert wgrad is not None
        own = replace(grad, dtype=E4M3)
        return replace(recipe, dgrad=(own, weight), wgrad=(own, wgrad[1]))

    return _judged(83, "tensorwise", _recipe("tensorwise", narrowed))


def scales_of_any_number(c: Composition) -> Judged:
    """Scales by row are not rounded to powers of two."""
    return _judged(85, "rowwise", _recipe("rowwise", lambda r: replace(r, power=False)))


def blocks_along_the_result(c: Composition) -> Judged:
    """A row of the input has a scale for each feature in place of one for all of them."""

    def turned(recipe: Float8Recipe) -> Float8Recipe:
        return replace(recipe, forward=(QuantisedOperand(ALL, 1), recipe.forward[1]))

    return _judged(87, "rowwise", _recipe("rowwise", turned))


def kept_layer_quantised(c: Composition) -> Judged:
    """A layer that is to stay in its dtype multiplies in float8."""
    right = float8_layers._chosen

    def chosen(layer: Any, asked: Float8, casts: Any) -> bool:
        return right(layer, replace(asked, keep=()), casts)

    return _judged(96, "tensorwise", patch.object(float8_layers, "_chosen", chosen))


def scale_of_the_own_part(c: Composition) -> Judged:
    """Devices that share a tensor quantise their parts by the scales of these."""

    def own(
        number: int, kind: str, axis: str, given: torch.Tensor, right: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        result = right(given)
        if kind == "all_gather" and given.dtype == torch.float32 and given.numel() == 1:
            return given.expand_as(result).clone()
        return result

    return _judged(89, "tensorwise", nullcontext(), exchanging(own), tp=2)


FLOAT8: tuple[JobFault, ...] = (
    gradient_in_e4m3, scales_of_any_number, blocks_along_the_result, kept_layer_quantised, scale_of_the_own_part,
)  # fmt: skip
