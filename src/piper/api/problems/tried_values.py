"""Say which values the parameters of a space have, and check the values that a user gives in their place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from piper.api.captures.capturing import rewritten
from piper.api.compiling.compiling import compile
from piper.api.problems.space_sizes import AXES, KEPT
from piper.api.problems.uneven_stages import ACCEPTED, counted, is_cut
from piper_compiler import Strategy, capture_request, recipes, recompute, shard
from piper_ir.ground.errors import PiperError, TuneError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import ANY, where

if TYPE_CHECKING:
    from piper_capture import Traced
    from piper_runtime import Job

ORDERS: Mapping[str, tuple[str, ...]] = {"usual": (), "pp_first": ("tp", "cp", "etp", "ep", "pp")}
"""The orders of axes by name: the second has neighbouring stages before replicas, as Megatron's tp-cp-ep-pp-dp."""
OF_EXPERTS = {"etp": 1, "fold": False, "cut": False, "beside": False}
"""The values that a job without dropless experts has alone."""


@dataclass(frozen=True)
class SpaceParameter:
    """Say which values a parameter of a space may have.

    Attributes:
        accepted: the values in words.
        takes: whether a value is one of them.
    """

    accepted: str
    takes: Callable[[Any], bool]


def _named(*values: str | bool) -> SpaceParameter:
    def takes(value: Any) -> bool:
        return any(type(value) is type(one) and value == one for one in values)

    return SpaceParameter(", ".join(map(str, values)), takes)


def _integer(least: int, most: float = inf) -> SpaceParameter:
    text = f"integers from {least} " + ("on" if most == inf else f"to {most}")
    return SpaceParameter(text, lambda value: type(value) is int and least <= value <= most)


def _number(least: float, most: float = inf, *words: str) -> SpaceParameter:
    text = f"numbers from {least:g} " + ("on" if most == inf else f"to {most:g}")

    def takes(value: Any) -> bool:
        number = type(value) in (int, float) and least <= value <= most and value < inf
        return number or (isinstance(value, str) and value in words)

    return SpaceParameter(" and ".join((text, *words)), takes)


_SWITCH = _named(False, True)
_SCHEDULES = ("1f1b", *(name for name in recipes.RECIPES if name != "one_f_one_b"))
PARAMETERS: Mapping[str, SpaceParameter] = {
    **dict.fromkeys((*AXES, "etp"), _integer(1)),
    "order": _named(*ORDERS),
    "rows": _integer(1),
    "sequence": _SWITCH,
    "pieces": _integer(1),
    "attention": _named("ring", "heads", "gather"),
    "fold": _SWITCH,
    "cut": _named(False, True, "tp", "cp", "tp+cp"),
    "beside": _SWITCH,
    "schedule": _named(*_SCHEDULES),
    "chunks": _integer(2),
    "at": SpaceParameter(ACCEPTED, is_cut),
    "tiles": _integer(1),
    "keep": SpaceParameter(
        'policies of piper.recompute, such as products/2, and "inputs@*.mlp" for the modules of that name',
        lambda value: isinstance(value, str),
    ),
    "group": _integer(1),
    "graded": _SWITCH,
    "away": _number(0, 1),
    "away_tensors": _named("all", "saved", "inputs"),
    "away_prefetch": _integer(0),
    "host": _named(False, True, "optim", "states"),
    "zero": _integer(0, 3),
    "hybrid": _SWITCH,
    "bucket_mb": SpaceParameter("numbers above 0", lambda v: _number(0).takes(v) and v > 0),
    "prefetch": _integer(0),
    "resident_mb": _number(0, inf, "step"),
    "whole_mb": _number(0),
}
"""The parameters by name."""


def tried_values(given: Mapping[str, Any], others: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """Return the values of each parameter that a user gives, one or a sequence of them.

    Raises TuneError for an unknown name, of these and `others`, and for a value that no job has.
    """
    if unknown := [name for name in given if name not in PARAMETERS]:
        names = ", ".join((*PARAMETERS, *others))
        raise TuneError(f"space({unknown[0]}=...): accepted are {names}")
    tried: dict[str, tuple[Any, ...]] = {}
    for name, value in given.items():
        values = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not values:
            raise TuneError(f"space({name}={value!r}): at least one value is needed")
        for one in values:
            if not PARAMETERS[name].takes(one):
                raise _refused(name, one, PARAMETERS[name].accepted)
        tried[name] = tuple(dict.fromkeys(values))
    return tried


@dataclass(frozen=True)
class TriedOfJob:
    """Check the values of a user against a job and a cluster.

    Attributes:
        job: the job.
        traced: its trace.
        devices: of the cluster.
        layers: of the model.
        experts: of a layer.
    """

    job: Job
    traced: Traced
    devices: int
    layers: int
    experts: int

    def check(self, tried: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise TuneError for a value that no plan of the job on these devices can have."""
        for name, value in [(name, value) for name, values in tried.items() for value in values]:
            if accepted := self._lacks(name, value):
                raise _refused(name, value, accepted)
            try:
                self._check_captured(name, value)
            except PiperError as error:
                raise TuneError(f"space({name}={value!r}): {error}") from error

    def _lacks(self, name: str, value: Any) -> str:
        """Return the values that the job may have, in words, if this is none of them."""
        return next(
            (accepted for lacking, accepted in self._conditions(name, value) if lacking), ""
        )

    def _conditions(self, name: str, value: Any) -> Iterator[tuple[bool, str]]:
        """Yield whether a value breaks a condition, and the values that keep it, in words."""
        if name in (*AXES, "etp"):
            yield bool(self.devices % value), f"the divisors of {self.devices} devices"
        if name == "rows":
            batch = self.job.global_batch
            yield bool(batch % value), f"the divisors of {batch} rows of a step"
        if name == "pp":
            least = max(self.layers, 1)
            yield value > least, f"as many stages as the model has layers, {self.layers}"
        if name == "ep":
            yield value > 1 == self.experts, "1 alone, since the model has no experts"
            yield bool(self.experts % value), f"the divisors of {self.experts} experts of a layer"
        if name in OF_EXPERTS:
            usual = OF_EXPERTS[name]
            without = value != usual and not self.traced.dropless
            yield without, f"{usual} alone, since the model has no dropless experts"
        if name == "at" and (counts := counted(value)):
            total = sum(counts)
            yield total != self.layers, f"sums of {self.layers} layers, and this is one of {total}"
        if name == "tiles":
            whole = value > 1 and not (self.traced.has_cross_entropy and self._tokens)
            yield whole, "1 alone, since the loss is no cross_entropy over tokens"

    @property
    def _tokens(self) -> int:
        return self.job.tokens_per_row or 0

    def _check_captured(self, name: str, value: Any) -> None:
        """Let a capture say whether the model has the modules of a policy, or the sizes and parts of experts."""
        if name == "keep" and value not in KEPT:
            layers = where(layer=ANY) if self.layers else where()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a search gives the model's own warnings
                compile(self.job, Strategy(Mesh(), (recompute(layers, keep=value, site=""),)))
        if (name == "beside" and value) or (name == "etp" and value > 1):
            sharers = next(n for n in range(2, self.experts + 1) if not self.experts % n)
            how: dict[str, Any] = {"beside": True} if name == "beside" else {"hidden": "etp"}
            mesh = Mesh(ep=sharers, etp=value if name == "etp" else 1)
            experts = where(experts=ANY)
            asked = shard(experts, over="ep", index="experts", stream="rows", site="", **how)
            rewritten(self.traced, capture_request(mesh, (asked,), self.traced.outline), 1)


def _refused(name: str, value: object, accepted: str) -> TuneError:
    return TuneError(f"space({name}={value!r}): accepted are {accepted}")
