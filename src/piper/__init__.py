"""Plan, simulate and execute distributed training of PyTorch models from one strategy.

Names are imported on first use, so that `import piper` is quick and simulating a synthetic program needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for editors and type checkers, which do not run `__getattr__`
    from piper import models as models
    from piper.api.compiling.compiling import Compiled as Compiled
    from piper.api.compiling.compiling import compile as compile
    from piper.api.ground.costs_file import load_costs as load_costs
    from piper.api.ground.costs_file import save_costs as save_costs
    from piper.api.problems.advice import Advice as Advice
    from piper.api.problems.advice import advice as advice
    from piper.api.problems.spaces import StrategySpace as StrategySpace
    from piper.api.problems.spaces import space as space
    from piper.api.running.execution import execute as execute
    from piper.api.running.profiling import profile as profile
    from piper.api.running.tuning import tune as tune
    from piper_autotune import Study as Study
    from piper_capture import region as region
    from piper_capture import replacement as replacement
    from piper_capture import tag as tag
    from piper_compiler import Options as Options
    from piper_compiler import Strategy as Strategy
    from piper_compiler import directive as directive
    from piper_compiler import eager as eager
    from piper_compiler import fail as fail
    from piper_compiler import load_strategy as load_strategy
    from piper_compiler import offload as offload
    from piper_compiler import order as order
    from piper_compiler import overlap as overlap
    from piper_compiler import partition as partition
    from piper_compiler import place as place
    from piper_compiler import read_schedule_csv as read_schedule_csv
    from piper_compiler import recipes as recipes
    from piper_compiler import recompute as recompute
    from piper_compiler import replicate as replicate
    from piper_compiler import save_strategy as save_strategy
    from piper_compiler import shard as shard
    from piper_compiler import site_field as site_field
    from piper_compiler import split as split
    from piper_compiler import split_backward as split_backward
    from piper_compiler import stream as stream
    from piper_compiler import synthetic as synthetic
    from piper_compiler import tile_loss as tile_loss
    from piper_compiler import write_schedule_csv as write_schedule_csv
    from piper_ir.ground.errors import DirectiveError as DirectiveError
    from piper_ir.ground.errors import PiperError as PiperError
    from piper_ir.ground.errors import PiperWarning as PiperWarning
    from piper_ir.ground.mesh import Mesh as Mesh
    from piper_ir.ground.select import ANY as ANY
    from piper_ir.ground.select import NONE as NONE
    from piper_ir.ground.select import Where as Where
    from piper_ir.ground.select import where as where
    from piper_ir.program.costs import Costs as Costs
    from piper_ir.program.costs import Duration as Duration
    from piper_ir.verify import verify as verify
    from piper_ops import op_cost as op_cost
    from piper_ops import shared as shared
    from piper_runtime import Checkpoints as Checkpoints
    from piper_runtime import Float8 as Float8
    from piper_runtime import Job as Job
    from piper_runtime import LossScale as LossScale
    from piper_runtime import Precision as Precision
    from piper_runtime import Run as Run
    from piper_runtime.data import from_dataset as from_dataset
    from piper_runtime.data import from_stream as from_stream
    from piper_runtime.rank import BatchedMuon as BatchedMuon
    from piper_runtime.rank import elementwise as elementwise
    from piper_runtime.rank import per_parameter as per_parameter
    from piper_simulator import Cluster as Cluster
    from piper_simulator import Comparison as Comparison
    from piper_simulator import CostModel as CostModel
    from piper_simulator import Device as Device
    from piper_simulator import Links as Links
    from piper_simulator import Network as Network
    from piper_simulator import Simulation as Simulation
    from piper_simulator import Why as Why
    from piper_simulator import Work as Work
    from piper_simulator import Zipf as Zipf
    from piper_simulator import compare as compare
    from piper_simulator import load_cluster as load_cluster
    from piper_simulator import simulate as simulate
    from piper_simulator import why as why

    __version__: str

_DISTRIBUTION = "piper-training"

_HOME = {
    # the job
    "Job": "piper_runtime",
    "Float8": "piper_runtime",
    "LossScale": "piper_runtime",
    "Precision": "piper_runtime",
    "Checkpoints": "piper_runtime",
    "from_dataset": "piper_runtime.data",
    "from_stream": "piper_runtime.data",
    "region": "piper_capture",
    "tag": "piper_capture",
    "replacement": "piper_capture",
    "BatchedMuon": "piper_runtime.rank",
    "elementwise": "piper_runtime.rank",
    "per_parameter": "piper_runtime.rank",
    "op_cost": "piper_ops",
    "shared": "piper_ops",
    # the language
    "Mesh": "piper_ir.ground.mesh",
    "Strategy": "piper_compiler",
    "where": "piper_ir.ground.select",
    "Where": "piper_ir.ground.select",
    "ANY": "piper_ir.ground.select",
    "NONE": "piper_ir.ground.select",
    "partition": "piper_compiler",
    "split": "piper_compiler",
    "split_backward": "piper_compiler",
    "place": "piper_compiler",
    "offload": "piper_compiler",
    "recompute": "piper_compiler",
    "replicate": "piper_compiler",
    "shard": "piper_compiler",
    "order": "piper_compiler",
    "overlap": "piper_compiler",
    "stream": "piper_compiler",
    "tile_loss": "piper_compiler",
    "eager": "piper_compiler",
    "recipes": "piper_compiler",
    "directive": "piper_compiler",
    "site_field": "piper_compiler",
    "fail": "piper_compiler",
    "load_strategy": "piper_compiler",
    "save_strategy": "piper_compiler",
    "read_schedule_csv": "piper_compiler",
    "write_schedule_csv": "piper_compiler",
    # what one does with it
    "synthetic": "piper_compiler",
    "compile": "piper.api.compiling.compiling",
    "Compiled": "piper.api.compiling.compiling",
    "Options": "piper_compiler",
    "execute": "piper.api.running.execution",
    "profile": "piper.api.running.profiling",
    "tune": "piper.api.running.tuning",
    "advice": "piper.api.problems.advice",
    "Advice": "piper.api.problems.advice",
    "space": "piper.api.problems.spaces",
    "StrategySpace": "piper.api.problems.spaces",
    "Study": "piper_autotune",
    "simulate": "piper_simulator",
    "Simulation": "piper_simulator",
    "why": "piper_simulator",
    "Why": "piper_simulator",
    "compare": "piper_simulator",
    "Comparison": "piper_simulator",
    "load_cluster": "piper_simulator",
    "Cluster": "piper_simulator",
    "Device": "piper_simulator",
    "Links": "piper_simulator",
    "Network": "piper_simulator",
    "CostModel": "piper_simulator",
    "Work": "piper_simulator",
    "Zipf": "piper_simulator",
    "Costs": "piper_ir.program.costs",
    "Duration": "piper_ir.program.costs",
    "load_costs": "piper.api.ground.costs_file",
    "save_costs": "piper.api.ground.costs_file",
    "Run": "piper_runtime",
    "verify": "piper_ir.verify",
    "PiperError": "piper_ir.ground.errors",
    "PiperWarning": "piper_ir.ground.errors",
    "DirectiveError": "piper_ir.ground.errors",
}

_MODULES = ("models",)
"""The submodules that are reached as attributes."""

__all__ = sorted([*_HOME, *_MODULES])


def _found(name: str) -> Any:
    """Return a public name, imported on first use."""
    if name == "__version__":  # the one in VERSION, as it was installed
        return version(_DISTRIBUTION)
    if name in _MODULES:
        return import_module(f"piper.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(
            f"module 'piper' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # to which a misspelt name is then an error
    __getattr__ = _found


def __dir__() -> list[str]:
    return __all__
