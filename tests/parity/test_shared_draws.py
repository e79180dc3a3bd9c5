"""Protect that devices which share a dropout draw the masks of their parts as one device draws them for the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import piper
from piper import Mesh, Strategy, models, recipes
from piper.api.reference.verification import verify_strategy
from piper_capture import layout_facts
from piper_compiler import Directive
from tests.faults import sharer_faults
from tests.helpers import parity
from tests.helpers.compositions import Composition
from tests.helpers.decoders import DECODERS
from tests.helpers.judged import judge

SIZES = replace(DECODERS["GPT-2"], kv_heads=2, attention="math", dropout=0.3)
LAYOUTS: dict[str, tuple[Mesh, Callable[[], tuple[Directive, ...]]]] = {
    "heads": (
        Mesh(tp=2, dp=2),
        lambda: (
            *recipes.tensor_parallel(), piper.split(piper.where(), microbatches=2), *recipes.data_parallel()
        ),
    ),
    "heads and groups": (Mesh(tp=4), lambda: recipes.tensor_parallel()),
    "tokens, recomputed": (
        Mesh(tp=2),
        lambda: (
            *recipes.tensor_parallel(sequence=True), piper.split(piper.where(), microbatches=2),
            piper.recompute(piper.where(), keep="inputs"),
        ),
    ),
}  # fmt: skip


def job(draws: Any = "rows") -> piper.Job:
    made = models.job(SIZES, global_batch=4, precision="float64", lr=0.01)
    return replace(made, draws=draws)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_with_dropout_trains_what_one_device_trains(layout: str) -> None:
    mesh, directives = LAYOUTS[layout]
    strategy = Strategy(mesh, directives())
    assert verify_strategy(job(), strategy, steps=2).equal
    compiled = piper.compile(job(), strategy)
    assert compiled.code is not None
    for facts in layout_facts(compiled.code, compiled.program):
        assert facts.work is not None
        products = {title.partition(" ")[0] for title in facts.work.whole} & {
            "bmm",
            "mm",
            "_softmax",
        }
        assert not products


def test_torchs_own_masks_are_cut_from_those_of_the_whole() -> None:
    mesh, directives = LAYOUTS["tokens, recomputed"]
    assert verify_strategy(job("microbatches"), Strategy(mesh, directives()), steps=2).equal


@pytest.mark.parametrize(
    "how",
    [dict(tp=2, stream="tokens"), dict(cp=2, attention="ring"), dict(tp=2, cp=2, order="zigzag")],
)
def test_shared_tokens_have_the_masks_of_one_device(how: dict[str, Any]) -> None:
    judge(Composition("gpt_dropout", microbatches=2, **how))


def test_masks_of_parts_that_are_drawn_as_wholes_are_seen() -> None:
    """Negative control: a device takes the first numbers of its place for its part."""
    found = sharer_faults.parts_drawn_as_wholes(
        Composition("gpt_dropout", microbatches=2, tp=2, stream="tokens")
    )
    assert found is not None
    with pytest.raises(AssertionError, match="step 0"):
        parity.assert_parity(*found)
