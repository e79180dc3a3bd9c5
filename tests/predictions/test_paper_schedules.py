"""The paper's schedules and meshes of mixtures: ratios and rates are judged, and the tuner finds a plan as fast."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.paper import figures, schedule_lines
from benchmarks.paper.schedule_lines import RATIOS, Line, Setup, ratio
from piper.models import MoEConfig

SIZES = MoEConfig(
    layers=4,
    width=4096,
    heads=32,
    kv_heads=8,
    hidden=4096,
    vocab=64,
    length=512,
    experts=2,
    top_k=1,
)
RATES = {
    "qwen3-moe-1b": {"1F1B": 100.0, "interleaved": 104.0, "DualPipeV": 106.0},
    "qwen3-moe-9b": {"1F1B": 100.0, "interleaved": 110.0, "DualPipeV": 120.0},
}


def stand_in(model: str, schedule: str, rate: float, pp: int = 8, width: int = 4) -> Line:
    simulation: Any = SimpleNamespace(tokens_per_s=rate)
    return Line(Setup(model, pp, width, shared=True), schedule, simulation)


def test_ratios_further_than_five_points_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    setups = [Setup("qwen3-moe-1b", 8, shared=True), Setup("qwen3-moe-9b", 4, shared=True)]
    lines = [
        stand_in(s.model, name, rate, s.pp) for s in setups for name, rate in RATES[s.model].items()
    ]
    percents = [pytest.approx(x) for x in (4.0, 6.0, 100 * (120 / 110 - 1))]
    assert [ratio(lines, p) for p in RATIOS] == percents
    monkeypatch.setattr(schedule_lines, "lines", lambda of: lines)
    monkeypatch.setattr(
        schedule_lines, "tuned", lambda s, trials: stand_in(s.model, "zbv", 110.0, s.pp)
    )
    rows = [*figures.schedules()]
    assert [row.value for row in rows[:3]] == percents
    assert [row.met for row in rows] == [True, False, True, True, False]


def test_the_rate_of_the_largest_mesh_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    small = stand_in("qwen3-moe-1b", "DualPipeV", 9e4, 2, 2)
    for rate, met in ((360_000.0, True), (340_000.0, False)):
        whole = stand_in("qwen3-moe-1b", "DualPipeV", rate)
        monkeypatch.setattr(schedule_lines, "grid", lambda shared, end=whole: [small, end])
        first, last = figures.meshes()
        assert first.goal is None and (last.value, last.met) == (rate, met)


@pytest.mark.long
def test_the_tuner_finds_a_plan_as_fast_as_dualpipe_v(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real plans of a mixture on four devices, with layers so wide that steps do not wait for the host."""
    space = {name: values[:1] for name, values in schedule_lines.SPACE.items()}
    space |= {"schedule": ("dualpipe_v", "zbv")}
    monkeypatch.setattr(schedule_lines, "SPACE", space)
    setup = Setup("qwen3-moe-1b", 2, 2, rows=4, sizes=SIZES)
    rates = {line.schedule: line.tokens_per_s for line in schedule_lines.lines([setup])}
    best = schedule_lines.tuned(setup, trials=4)
    assert best.tokens_per_s >= rates["DualPipeV"] > rates["1F1B"] > 0
    assert "schedule" in best.schedule
