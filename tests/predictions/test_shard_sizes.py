"""What devices that share a layer save is what the literature says, and their sums are made in place."""

from __future__ import annotations

import pytest

import piper
from benchmarks import shard_sizes
from piper import Mesh
from piper_capture.steps import exchanges
from piper_ops.pointwise import collectives
from tests.helpers import shared_jobs


def source_of(stream: str) -> str:
    """The code of a layer's forward and backward on one of two devices."""
    made = shared_jobs.compiled("llama", Mesh(tp=2), [], stream=stream)
    assert made.code is not None
    code = next(c.code for c in made.plan.chunks if c.id == "layer1")
    return "".join(step.source for step in made.code.get(code, made.plan.rows).values())


def test_sums_over_devices_copy_nothing() -> None:
    """What is added up over the devices is a product that nothing else reads."""
    source = source_of("")
    assert source.count("EXCHANGE('all_reduce'") == 4
    assert "clone" not in source


def test_terms_that_are_needed_again_are_copied() -> None:
    assert "x.clone(" in exchanges.call(collectives.all_reduce, "x", "tp")
    assert "clone" not in exchanges.call(collectives.all_reduce_, "x", "tp")


@pytest.mark.long
def test_a_layer_saves_what_korthikanti_count() -> None:
    """Table 2 of arXiv 2205.05198 without dropout: 276.8 MB on each of eight devices, and 100.7 MB with sequence
    parallelism; the difference is statistics, which it does not count."""
    whole = shard_sizes.shared("gpt3-175b", 1)
    for stream, megabytes in (("", 276.8), ("tokens", 100.7)):
        found, formula = (
            shard_sizes.shared("gpt3-175b", 8, stream),
            shard_sizes.published("gpt3-175b", 8, stream),
        )
        assert formula == pytest.approx(megabytes * 1e6, rel=1e-3)
        assert found.values == formula
        assert found.saved == pytest.approx(formula, rel=2e-3)
    assert 8 * found.saved == whole.saved
    assert 8 * found.flops < 1.001 * whole.flops


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_devices_that_share_tokens_save_their_part(name: str) -> None:
    def saved(degree: int) -> shard_sizes.LayerShare:
        directives = [piper.shard(piper.where(), stream="tokens")] if degree > 1 else []
        made = piper.compile(shared_jobs.job(name), piper.Strategy(Mesh(tp=degree), directives))
        return shard_sizes.of_layer(next(c for c in made.plan.chunks if c.id == "layer1"))

    whole = saved(1)
    assert 2 * saved(2).saved == whole.saved > 0
    assert 4 * saved(4).saved == whole.saved


def test_a_plan_has_the_instructions_of_whole_layers() -> None:
    """What devices exchange is inside of the steps; gradients of whole parameters are equal, not terms of a sum."""

    def counted(degree: int) -> list[int]:
        directives = [piper.shard(piper.where())] if degree > 1 else []
        made = piper.compile(
            shared_jobs.job("llama"),
            piper.Strategy(
                Mesh(tp=degree, pp=2),
                [*directives, *piper.recipes.one_f_one_b(pp=2, microbatches=4)],
            ),
        )
        assert not any(bucket.over for bucket in made.plan.buckets)
        return sorted(len(role.program) for role in made.plan.roles)

    assert counted(2) == counted(1)
