"""Show where a step's time goes on one rank.

torch's profiler says what operators take, cProfile how long the main thread waits.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable

import torch

Profile = dict[str, float]
"""Category -> seconds per step. The categories without WAITING add up to the wall time of a profiled step."""

REST = "outside of operators (Python and waiting)"
WAITING = "of that, waiting (from another run, under cProfile)"
MARK = "profiled steps"
RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("communication calls", ("gloo:", "c10d::", "record_param_comms")),
    (
        "matmul",
        ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::matmul", "aten::linear"),
    ),
    ("attention", ("attention", "piper::sdpa")),
    ("optimizer", ("optimizer", "adam")),
    (
        "norm, loss, embedding",
        ("layer_norm", "softmax", "nll_loss", "cross_entropy", "embedding", "index"),
    ),
    ("autograd engine", ("autograd::", "backward0", "backward1", "accumulategrad")),
    ("copies and fills", ("copy", "clone", "contiguous", "fill", "zero", "empty", "cat", "stack")),
    ("element-wise and views", ("aten::", "piper::")),
)
"""The parts of operators' names, in lower case, by category; the first that fits counts.

A name that fits none is a label around Python code.
"""

WAITS = ("_distributed_c10d.wait",)
"""Functions in which a main thread waits for communication, on both sides."""


def profiled(step: Callable[[], None], steps: int) -> Profile:
    """Profile some steps twice, once with each profiler.

    Their own cost is in the numbers (about a microsecond per operator and per Python call), so they show what differs
    rather than what a step takes. Only the main thread counts: it computes, on both sides.
    """
    waiting = _waiting(step, steps)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=activities) as profiler,
        torch.profiler.record_function(MARK),
    ):
        for _ in range(steps):
            step()
    events = profiler.events()
    assert events is not None
    main = next(e for e in events if e.name == MARK)
    out: Profile = {WAITING: waiting}
    for event in events:
        if event.thread == main.thread:
            category = _category(event.name)
            out[category] = out.get(category, 0.0) + event.self_cpu_time_total * 1e-6 / steps
    return out


def _category(name: str) -> str:
    lowered = name.lower()
    for category, parts in RULES:
        if any(part in lowered for part in parts):
            return category
    return REST


def _waiting(step: Callable[[], None], steps: int) -> float:
    """Return the seconds per step in which the main thread waits for communication."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        step()
    profiler.disable()
    profiles = pstats.Stats(profiler).get_stats_profile().func_profiles
    return sum(p.tottime for name, p in profiles.items() if any(w in name for w in WAITS)) / steps
