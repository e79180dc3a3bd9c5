"""Search the parameters of a strategy in simulation, under a memory limit; the caller passes a function to run plans.

Other packages import its names from here. Names are loaded on first use: worker processes need no optuna.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from piper_autotune.scoring.jobs import JobCase, JobCases
    from piper_autotune.scoring.scoring import Scored
    from piper_autotune.scoring.single_changes import OneWord, ScoredHere, WayOut
    from piper_autotune.searching.confirm import Confirmation
    from piper_autotune.searching.search import SearchProgress
    from piper_autotune.searching.study import NothingFoundError, SearchError, Study
    from piper_autotune.searching.tuner import tune
    from piper_autotune.space.objective import OBJECTIVES, Objective, check_objective, value_text
    from piper_autotune.space.problem import TuningProblem, Wanted
    from piper_autotune.space.rules import RULES

__all__ = [
    "OBJECTIVES",
    "RULES",
    "Confirmation",
    "JobCase",
    "JobCases",
    "NothingFoundError",
    "Objective",
    "OneWord",
    "Scored",
    "ScoredHere",
    "SearchError",
    "SearchProgress",
    "Study",
    "TuningProblem",
    "Wanted",
    "WayOut",
    "check_objective",
    "tune",
    "value_text",
]

_HOME = {
    "OBJECTIVES": "space.objective",
    "RULES": "space.rules",
    "Confirmation": "searching.confirm",
    "JobCase": "scoring.jobs",
    "JobCases": "scoring.jobs",
    "NothingFoundError": "searching.study",
    "Objective": "space.objective",
    "OneWord": "scoring.single_changes",
    "Scored": "scoring.scoring",
    "ScoredHere": "scoring.single_changes",
    "SearchError": "searching.study",
    "SearchProgress": "searching.search",
    "Study": "searching.study",
    "TuningProblem": "space.problem",
    "Wanted": "space.problem",
    "WayOut": "scoring.single_changes",
    "check_objective": "space.objective",
    "tune": "searching.tuner",
    "value_text": "space.objective",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(
            f"module 'piper_autotune' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    value = getattr(import_module(f"piper_autotune.{_HOME[name]}"), name)
    globals()[name] = value
    return value
