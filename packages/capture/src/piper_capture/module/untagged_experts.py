"""Find the modules of a model that look like experts, for the error that no region of experts was found."""

from __future__ import annotations

from collections.abc import Iterator

from piper_ir.program.layout import EXPERTS
from piper_ir.program.program import Program

SELECT_EXPERTS = "where(experts=ANY) selects the regions of experts alone"
GATED = frozenset({"gate_up_proj", "down_proj"})
"""The matrices of experts that the replacement "gated_experts" computes."""
STACKED = 3
"""The number of dimensions of a weight with one matrix per expert."""


def way_to_experts(program: Program) -> str:
    """Return the advice for a selection that finds no chunk of experts."""
    if any(EXPERTS in chunk.coords for chunk in program.chunks):
        return SELECT_EXPERTS
    region = "put the experts' products into `with piper.region(experts=0)`"
    stacks = dict(_stacks(program))
    if not stacks:
        return f"{region}, or tag their module: piper.tag(model, {{'layers.*.experts': dict(experts=0)}})"
    first, matrices = next(iter(stacks.items()))
    more = f" and {len(stacks) - 1} more" if len(stacks) > 1 else ""
    pattern = ".".join("*" if part.isdigit() else part for part in first.split("."))
    tag = "in the function that makes the model: piper.tag(model, {" + repr(pattern)
    if matrices >= GATED:
        return f"tag module {first!r}{more} {tag}: dict(experts=0, replace='gated_experts')}})"
    return (
        f"if the matrices of module {first!r}{more} are experts, tag it {tag}: dict(experts=0)}}), with "
        f"replace=... where it loops over them (@piper.replacement); or {region}"
    )


def _stacks(program: Program) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the modules that have several stacks of equally many matrices, with the names of these parameters."""
    stacks: dict[str, dict[str, object]] = {}
    for param in program.params:
        module, _, name = param.name.rpartition(".")
        if module and len(param.spec.shape) == STACKED:
            stacks.setdefault(module, {})[name] = param.spec.shape[0]
    for module, experts_by_name in stacks.items():
        if len(experts_by_name) > 1 and len(set(experts_by_name.values())) == 1:
            yield module, frozenset(experts_by_name)
