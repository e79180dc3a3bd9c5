"""Call the metrics of a job next to its loss, so that they are scalars of the last chunk beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from piper_ir.ground.errors import CaptureError

OutputMetrics = Mapping[str, Callable[[Any, Any], Any]]
"""The functions of (output, targets), by the name of their metric."""

NEEDED = "a scalar is needed, the mean over rows; a pair (sum, weight) of scalars; or a dict of those by name"


@dataclass(frozen=True)
class MetricNode:
    """Name a node of the captured graph that is a metric, or the weight by which a metric's sum is divided.

    A "metric_total" is a partial sum over rows.
    """

    kind: Literal["metric", "metric_weight", "metric_total"]
    name: str
    node: fx.Node


def measured(
    metrics: OutputMetrics, output: Any, targets: Any, dtype: torch.dtype
) -> dict[str, tuple[Any, ...]]:
    """Return the metrics by name: a mean over rows, or a sum and its weight; in the loss's dtype.

    The metrics in a dict that a function returns are named after both: "accuracy/top5".
    """
    values_by_name: dict[str, tuple[Any, ...]] = {}
    for name, function in metrics.items():
        result = function(output, targets)
        if isinstance(result, dict):
            for key, value in result.items():
                values_by_name[f"{name}/{key}"] = _scalars(value, dtype)
        else:
            values_by_name[name] = _scalars(result, dtype)
    return values_by_name


def _scalars(value: Any, dtype: torch.dtype) -> tuple[Any, ...]:
    if isinstance(value, tuple | list):
        return tuple([_scalar(item, dtype) for item in value])
    return (_scalar(value, dtype),)


def _scalar(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(dtype).clone()
    if isinstance(value, bool | int | float):
        return torch.full((), value, dtype=dtype)
    return value


def metric_nodes(
    found: Mapping[str, Sequence[Any]], node_of: Callable[[Any], fx.Node | None]
) -> tuple[MetricNode, ...]:
    """Return the nodes of metrics; raise CaptureError for a metric that is neither a mean nor (sum, weight)."""
    collected: list[MetricNode] = []
    for name, values in found.items():
        nodes = [node_of(value) for value in values]
        scalars = [isinstance(value, Tensor) and value.dim() == 0 for value in values]
        if len(values) not in (1, 2) or not all(scalars) or None in nodes:
            raise CaptureError(
                f"Job(metrics=...): {name!r} returned {', '.join(map(_shown, values)) or 'nothing'}; {NEEDED}"
            )
        kinds: tuple[Literal["metric", "metric_weight"], ...] = ("metric", "metric_weight")
        collected += [
            MetricNode(kind, name, node) for kind, node in zip(kinds, nodes) if node is not None
        ]
    return tuple(collected)


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"an object of type {type(value).__name__}"
    sizes = ["rows" if isinstance(size, torch.SymInt) else str(size) for size in value.shape]
    return f"a tensor of shape [{', '.join(sizes)}]"
