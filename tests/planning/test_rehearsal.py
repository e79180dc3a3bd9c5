"""A planned strategy is rehearsed on a twin that is equal to plain PyTorch, and a wrong twin is not."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from piper import models
from piper.api.problems.scale import Scale
from piper.api.problems.spaces import StrategySpace
from piper.api.reference.reference_differences import Difference
from piper.models import DecoderConfig, Experts
from piper.planning import rehearsal
from piper.planning.rehearsal import rehearse, shrunk_model
from piper_compiler import Strategy, recompute
from piper_ir.ground.mesh import Mesh

LARGE = DecoderConfig(
    layers=32, width=4096, heads=32, kv_heads=8, hidden=14336, vocab=128256, length=8192
)
MIXTURE = DecoderConfig(
    layers=32, width=4096, heads=32, kv_heads=8, hidden=14336, vocab=32000, length=4096,
    experts=Experts(number=64, top_k=6, hidden=1408, shared_hidden=2816), dense_layers=3,
)  # fmt: skip


def space(experts: bool = False, memory_bytes: int = 10**9, **sizes: int) -> StrategySpace:
    return StrategySpace(
        64,
        512,
        32,
        {axis: (sizes.get(axis, 1),) for axis in ("tp", "cp", "ep", "pp", *({"etp"} & {*sizes}))},
        (1,),
        Scale(0, 0, 1, 1, 1024, memory_bytes, 1.0, 1.0, 1.0, 8),
        8 if experts else 1,
        tiles=True,
    )


def chosen(**params: object) -> Strategy:
    rest = {"keep": "products", "zero": 3, "prefetch": 1, "resident_mb": 0, "bucket_mb": 100.0}
    return Strategy(Mesh(dp=1), (), params={**rest, **params})


def test_a_pipeline_beside_fsdp_and_tensor_parallelism():
    params = {"schedule": "interleaved", "chunks": 4, "sequence": True, "zero": 1}
    report = rehearse(LARGE, chosen(**params), space(tp=8, pp=4))
    assert report.equal and len(report.reports) == 1
    assert str(report.reports[0].strategy.mesh) == "Mesh(pp=2, dp=2, tp=2)"
    assert "equal to plain PyTorch" in report.text()


def test_what_saves_memory_is_rehearsed():
    params = {"schedule": "interleaved", "chunks": 2, "keep": "inputs", "graded": True}
    report = rehearse(LARGE, chosen(**params, tiles=8, away=0.5), space(pp=4, memory_bytes=120_000))
    directives = report.reports[0].strategy.directives
    assert report.equal and {"Offload", "TileLoss"} <= {type(d).__name__ for d in directives}
    assert {d.keep for d in directives if isinstance(d, recompute)} == {"inputs", "attention"}


@pytest.mark.long
def test_a_mixture_of_experts():
    assert rehearse(MIXTURE, chosen(), space(experts=True, ep=8)).equal


@pytest.mark.long
def test_values_of_a_user_are_rehearsed():
    """Replicas along rep and etp have rows of their own, and boundaries of stages are of the model, not of the twin."""
    tried = {"hybrid": (True,), "host": ("states",), "at": ("last-2",), "group": (2,), "etp": (2,)}
    for parts, config, own in (
        (space(pp=4), LARGE, "pp"),
        (space(experts=True, ep=2, etp=2), MIXTURE, "etp"),
    ):
        parts = replace(parts, tried=tried, dropless=True)
        report = rehearse(config, chosen(keep="inputs", schedule="1f1b"), parts)
        axes = {axis for one in report.reports for axis in one.strategy.mesh.axes}
        assert report.equal and {"rep", own} <= axes


def test_four_axes_are_rehearsed_in_pairs():
    axes = ("tp", "cp", "dp", "pp")
    sets = list(rehearsal._subsets(axes))
    assert all(len(chosen) == 3 for chosen in sets)
    assert all(any({a, b} <= set(chosen) for chosen in sets) for a, b in combinations(axes, 2))


def test_a_twin_has_the_same_parts():
    small = shrunk_model(MIXTURE, stages=4)
    assert (small.layers, small.dense_layers, small.kv_heads) == (5, 1, 2)
    assert small.experts is not None and small.experts.shared_hidden
    assert models.parameter_count(small) < 200_000


@pytest.mark.long
def test_a_difference_is_told(monkeypatch):
    """A negative control: a report with a difference is not taken for equal."""
    reference = rehearsal.verify_strategy
    monkeypatch.setattr(
        rehearsal,
        "verify_strategy",
        lambda job, strategy, steps: _spoilt(reference(job, strategy, steps=steps)),
    )
    report = rehearse(LARGE, chosen(), space())
    assert not report.equal and "NOT what one device computes" in report.text()


def _spoilt(report):
    return replace(report, differences=[Difference(0, "loss", -1, "", "1.0, not 2.0")])
