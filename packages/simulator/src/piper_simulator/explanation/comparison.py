"""Compare two steps: their critical paths, and the time of their devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from piper_ir.ground.errors import PlanError
from piper_simulator.explanation.causes import Cause
from piper_simulator.explanation.why import Why


@dataclass(frozen=True, slots=True)
class StepDifference:
    """Hold the values of two steps in one category; `change` is b - a."""

    name: str
    a: float
    b: float

    @property
    def change(self) -> float:
        return self.b - self.a


@dataclass(frozen=True)
class Comparison:
    """Hold the changes from a to b, the largest first.

    The changes of `path`, and the changes of `device`, add up to the change of the step.

    Attributes:
        step: seconds of the steps.
        path: seconds on the critical path by phase and stage, channel purpose or host.
        device: seconds of the mean rank: compute by phase, bubbles by awaited phase, exposed communication, host.
        memory: bytes by category at the peak of the fullest rank.
        peak: bytes of these peaks.
    """

    step: StepDifference
    path: tuple[StepDifference, ...]
    device: tuple[StepDifference, ...]
    memory: tuple[StepDifference, ...]
    peak: StepDifference

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as plain numbers and text, for programs."""
        tables = {"path": self.path, "device": self.device, "memory": self.memory}
        rows = {name: [_row(d) for d in differences] for name, differences in tables.items()}
        return {"step_s": _row(self.step), "peak_bytes": _row(self.peak), **rows}


def _row(difference: StepDifference) -> dict[str, Any]:
    return asdict(difference) | {"change": difference.change}


def compare(a: Why, b: Why) -> Comparison:
    """Return where the change from a to b arises; the plans may differ in everything, and stages match by number.

    Raises PlanError unless both are results of `why`.
    """
    for argument in (a, b):
        if not isinstance(argument, Why):
            raise PlanError(
                f"compare: a {type(argument).__name__} was given; two results of piper.why are needed"
            )
    return Comparison(
        StepDifference("step", a.step_s, b.step_s),
        _differences(_by(a.path_by_owner), _by(b.path_by_owner)),
        _differences(_named(a.device_by_owner), _named(b.device_by_owner)),
        _differences(a.peak_bytes, b.peak_bytes),
        StepDifference("peak", sum(a.peak_bytes.values()), sum(b.peak_bytes.values())),
    )


def _by(owners: Mapping[Cause, float]) -> dict[str, float]:
    """Sum by phase and stage, purpose, or host, since names of channels and roles do not match between plans."""
    seconds_by_name: dict[str, float] = {}
    for owner, seconds in owners.items():
        computes = owner.text if owner.where.startswith("stage") else owner.what
        name = {
            "compute": computes,
            "communication": f"communication: {owner.what}",
            "host": "host",
        }[owner.kind]
        seconds_by_name[name] = seconds_by_name.get(name, 0.0) + seconds
    return seconds_by_name


def _named(kinds: Mapping[tuple[str, str], float]) -> dict[str, float]:
    texts = {
        "compute": "compute: {}",
        "bubble": "bubble, waiting for {}",
        "communication": "exposed communication: {}",
    }
    return {
        texts.get(kind, "host").format(what): seconds for (kind, what), seconds in kinds.items()
    }


def _differences(a: Mapping[str, float], b: Mapping[str, float]) -> tuple[StepDifference, ...]:
    differences = [StepDifference(name, a.get(name, 0), b.get(name, 0)) for name in {**a, **b}]
    return tuple(sorted(differences, key=lambda d: (-abs(d.change), d.name)))
