"""Plan, simulate and execute distributed training of PyTorch models from one strategy.

Names are imported on first use, so that `import piper` is quick and simulating a synthetic program needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

_DISTRIBUTION = "piper-training"

_HOME = {
    # the job
    "Job": "piper_runtime",
    "Precision": "piper_runtime",
    "Checkpoints": "piper_runtime",
    "from_dataset": "piper_runtime.data",
    "from_stream": "piper_runtime.data",
    "region": "piper_compiler.capture",
    "tag": "piper_compiler.capture",
    "op_cost": "piper_ops",
    "shared": "piper_ops",
    # the language
    "Mesh": "piper_ir.mesh",
    "Strategy": "piper_compiler",
    "where": "piper_ir.select",
    "Where": "piper_ir.select",
    "ANY": "piper_ir.select",
    "NONE": "piper_ir.select",
    "partition": "piper_compiler",
    "split": "piper_compiler",
    "split_backward": "piper_compiler",
    "place": "piper_compiler",
    "recompute": "piper_compiler",
    "replicate": "piper_compiler",
    "shard": "piper_compiler",
    "order": "piper_compiler",
    "overlap": "piper_compiler",
    "stream": "piper_compiler",
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
    "compile": "piper.api.compiling",
    "Compiled": "piper.api.compiling",
    "execute": "piper.api.execution",
    "profile": "piper.api.profiling",
    "tune": "piper.api.tuning",
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
    "Costs": "piper_ir.costs",
    "Duration": "piper_ir.costs",
    "load_costs": "piper.api.costs_file",
    "save_costs": "piper.api.costs_file",
    "Run": "piper_runtime",
    "verify": "piper_ir.verify",
    "PiperError": "piper_ir.errors",
    "DirectiveError": "piper_ir.errors",
}

_MODULES = ("models",)
"""The submodules that are reached as attributes."""

__all__ = sorted([*_HOME, *_MODULES])


def __getattr__(name: str) -> Any:
    if name == "__version__":  # the one in VERSION, as it was installed
        return version(_DISTRIBUTION)
    if name in _MODULES:
        return import_module(f"piper.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'piper' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
