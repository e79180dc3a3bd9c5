"""Search the parameters of a strategy in simulation, under a memory limit; the caller passes what runs plans.

Other packages import what they need from here. Names are loaded on first use: worker processes need no optuna.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from piper_autotune.confirm import Confirmation
    from piper_autotune.jobs import JobCase, JobCases
    from piper_autotune.objective import OBJECTIVES, Objective, check_objective, value_text
    from piper_autotune.one_word import OneWord, ScoredHere, WayOut
    from piper_autotune.problem import TuningProblem, Wanted
    from piper_autotune.rules import RULES
    from piper_autotune.scoring import Scored
    from piper_autotune.search import SearchProgress
    from piper_autotune.study import NothingFoundError, SearchError, Study
    from piper_autotune.tuner import tune

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
    "OBJECTIVES": "objective",
    "RULES": "rules",
    "Confirmation": "confirm",
    "JobCase": "jobs",
    "JobCases": "jobs",
    "NothingFoundError": "study",
    "Objective": "objective",
    "OneWord": "one_word",
    "Scored": "scoring",
    "ScoredHere": "one_word",
    "SearchError": "study",
    "SearchProgress": "search",
    "Study": "study",
    "TuningProblem": "problem",
    "Wanted": "problem",
    "WayOut": "one_word",
    "check_objective": "objective",
    "tune": "tuner",
    "value_text": "objective",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'piper_autotune' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(f"piper_autotune.{_HOME[name]}"), name)
    globals()[name] = value
    return value
