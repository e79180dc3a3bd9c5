"""Refuse strategies before a model is captured, by the mesh, the directives and the model's modules alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from piper_compiler import Strategy, check_strategy, describe, shard
from piper_ir.ground.errors import DirectiveError

if TYPE_CHECKING:
    from piper_runtime import Job


def check_before_capture(job: Job, strategy: Strategy) -> None:
    """Raise DirectiveError or CompileError for a strategy that no capture of this job's model could serve.

    A model is made for it only where devices are to share experts; its constructor takes a small part of the time of a
    capture. Everything else is refused after the capture.
    """
    check_strategy(strategy)
    mesh = strategy.mesh
    for item in strategy.directives:
        if not isinstance(item, shard) or not item.experts or not mesh.along(item.joined):
            continue
        axes = mesh.along(item.joined)
        for name, number, dropless in _experts(job):
            said = f"{describe(item)}: the mixture {name!r}"
            if number % mesh.degree(axes):
                raise DirectiveError(
                    f"{said} has {number} experts, which {mesh.degree(axes)} devices along {' x '.join(axes)} cannot "
                    f"share equally; choose a number of devices that divides {number}"
                )
            if len(axes) > 1 and not dropless:
                raise DirectiveError(
                    f"{said} has places for so many tokens as its capacity says; devices share such experts over one "
                    f"axis, and dropless ones over several"
                )


def _experts(job: Job) -> Iterator[tuple[str, int, bool]]:
    """Yield the mixtures of a model that say their experts: name, number of experts, whether they are dropless."""
    from piper.models import DecoderConfig

    config = getattr(job.model, "__self__", None)
    if isinstance(config, DecoderConfig):
        if config.experts is not None:
            yield "experts", config.experts.number, config.experts.capacity_factor is None
        return
    from piper_capture import built_model, replaced_experts

    for name, number in replaced_experts(built_model(job.model)):
        yield name, number, True
