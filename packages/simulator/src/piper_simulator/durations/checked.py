"""Make the cost model of a plan, and check the results of a user's own model: they must be durations."""

from __future__ import annotations

from functools import partial
from numbers import Real
from typing import Any, get_args

from piper_ir.ground.errors import ClusterError, CostModelError, PiperError, PlanError
from piper_ir.ground.trace import Source
from piper_ir.plan.plan import Instr, Plan, RolePlan
from piper_ir.program.costs import Costs
from piper_ir.tools import user_code, user_line
from piper_simulator.cluster.checks import is_finite, shown
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.durations.cost_model import CostModel, CostModelFactory, Work
from piper_simulator.durations.device_model import DeviceModel
from piper_simulator.durations.expert_work import Loads

_SOURCES = get_args(Source)
_MEMBERS = ("work", "issue_s", "uniform", "notes")


def model_for(
    plan: Plan, cluster: Cluster | None, costs: Costs | None, factory: CostModelFactory
) -> CostModel:
    """Return the cost model of a plan.

    Raises ClusterError when the plan has more ranks than the cluster has devices, and CostModelError for a user's model
    that cannot be made. A user's model raises CostModelError when it gives something else than a duration.
    """
    if cluster is not None and plan.mesh.world > cluster.devices:
        world = plan.mesh.world
        raise ClusterError(
            f"the plan runs on {world} ranks; {cluster.name} has {cluster.devices} devices; name a cluster of at "
            f"least {world}, or use a smaller mesh"
        )
    if factory is DeviceModel:
        return factory(plan, cluster, costs)
    name = (
        getattr(factory, "__name__", None)
        or getattr(getattr(factory, "func", None), "__name__", None)
        or repr(factory)
    )
    if not callable(factory):
        raise CostModelError(
            f"model={name}: a class that inherits from piper.CostModel is needed, or a function, called as "
            f"model(plan, cluster, costs)"
        )
    with user_code(f"model={name}: {name}(plan, cluster, costs)", CostModelError):
        model: CostModel = factory(plan, cluster, costs)
    if type(model) is DeviceModel:
        return model
    return _CheckedModel(model, name)


def under_load(model: CostModelFactory, loads: Loads) -> CostModelFactory:
    """Return the cost model under loads of experts, the tokens of the fullest rank over the mean.

    Raises PlanError for a load other than 1 if the model is not Piper's own.
    """
    if all(load == 1 for load, _ in loads):
        return model
    if model is not DeviceModel:
        mean = sum(load * share for load, share in loads)
        raise PlanError(
            f"load={mean:g}: a cost model of your own decides itself how long experts take; leave the load out"
        )
    return partial(DeviceModel, loads=loads)


class _CheckedModel(CostModel):
    """Ask a user's model, and check its answers."""

    def __init__(self, model: Any, name: str) -> None:
        missing = [member for member in _MEMBERS if not hasattr(model, member)]
        if missing:
            raise CostModelError(
                f"model={name} made a {type(model).__name__}, which has no {', '.join(missing)}; inherit from "
                f"piper.CostModel, which has the defaults"
            )
        self._model, self._name = model, name
        self.issue_s, self.uniform = model.issue_s, bool(model.uniform)
        if not _is_amount(self.issue_s):
            raise CostModelError(
                f"model={name}: issue_s is {shown(self.issue_s)}; finite seconds from 0 on are needed"
            )

    def work(self, role: RolePlan, instr: Instr) -> Work:
        """Return the model's work; raise CostModelError with role and instruction if it is none."""
        try:
            done: object = self._model.work(role, instr)
        except PiperError:
            raise
        except Exception as e:  # a user's function may fail in any way
            raise self._error(role, instr, f"raised {type(e).__name__}: {e}{user_line(e)}") from e
        if not isinstance(done, Work):
            raise self._error(role, instr, f"gave {done!r}; a piper.Work is needed")
        for name in ("seconds", "launch_s"):
            if not _is_amount(amount := getattr(done, name)):
                raise self._error(
                    role, instr, f"gave {name}={shown(amount)}; finite seconds from 0 on are needed"
                )
        for name in ("bytes", "flops"):
            if not _is_amount(amount := getattr(done, name)) or amount % 1:
                raise self._error(
                    role, instr, f"gave {name}={shown(amount)}; a whole number from 0 on is needed"
                )
        if done.source not in _SOURCES:
            raise self._error(
                role, instr, f"gave source={done.source!r}; accepted are {', '.join(_SOURCES)}"
            )
        return done

    def _error(self, role: RolePlan, instr: Instr, problem: str) -> CostModelError:
        return CostModelError(
            f"model={self._name}: work(role {role.role!r}, instruction {instr.name}) {problem}"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the model's notes."""
        with user_code(f"model={self._name}: notes", CostModelError):
            return tuple(map(str, self._model.notes))


def _is_amount(value: object) -> bool:
    """Return whether a value is a finite number from 0 on; NumPy's numbers count."""
    return (
        isinstance(value, Real)
        and not isinstance(value, bool)
        and is_finite(value)
        and float(value) >= 0
    )
