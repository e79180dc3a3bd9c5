"""Name the lines of the model's code for chunks that make devices wait for each other in a circle, or lack a stage.

A program has no lines. The remarks are made at capture and shown beside the compiler's message.
"""

from __future__ import annotations

from piper_capture.chunks.cut import Cut
from piper_capture.module.tags import LAYER
from piper_capture.values.concrete import line_of


def remarks(cut: Cut) -> dict[str, str]:
    """Return remarks by chunk.

    A chunk gets one if it is a further visit of a block, if it updates a buffer that others update too, or if it has no
    stage and others have one.
    """
    return _without_stage(cut) | _updates(cut) | _visits(cut)


def _without_stage(cut: Cut) -> dict[str, str]:
    coords = [p.region.coords for p in cut.pieces]
    if all("stage" in c for c in coords) or not any("stage" in c for c in coords):
        return {}
    return {
        p.region.id: f"{p.region.id} begins at {line_of(p.region.nodes[0])}"
        for p in cut.pieces
        if "stage" not in p.region.coords
    }


def _visits(cut: Cut) -> dict[str, str]:
    remark_of: dict[str, str] = {}
    layers = [p.region.coords[LAYER] for p in cut.pieces if LAYER in p.region.coords]
    first: dict[tuple[tuple[str, int], ...], str] = {}
    for k, piece in enumerate(cut.pieces):
        coords = piece.region.coords
        base = first.setdefault(tuple(coords.items()), piece.region.id)
        if not coords or base == piece.region.id:
            continue
        own = f"layer={max(layers) + 1}" if LAYER in coords else "part=1"
        remark_of[piece.region.id] = (
            f"{piece.region.id} is visit {piece.region.visit + 1} of {base}: {line_of(piece.region.nodes[0])} runs "
            f"again, after {cut.pieces[k - 1].region.id}. Give this visit coordinates of its own (`with "
            f"piper.region({own}):`), or put what runs in between on the same device, or leave the order of "
            f"compute open (no order directive)"
        )
    return remark_of


def _updates(cut: Cut) -> dict[str, str]:
    """Return remarks on chunks that update a buffer that another chunk updates in the same microbatch."""
    written: dict[str, dict[str, str]] = {}
    buffers = {
        o.name: cut.facts.storages[n] for n, o in cut.forward.origins.items() if o.kind == "buffer"
    }
    for piece in cut.pieces:
        for node in filter(cut.facts.writes.get, piece.region.nodes):
            for name, storages in buffers.items():
                if cut.facts.writes[node] & storages:
                    written.setdefault(name, {})[piece.region.id] = line_of(node)
    said = {
        name: f"buffer {name!r} is updated by {', '.join(lines)} in one microbatch: "
        f"{', '.join(dict.fromkeys(lines.values()))}. Give each layer a buffer of its own, update it in one "
        f"place, or put all of these on one device"
        for name, lines in written.items()
        if len(lines) > 1
    }
    return {chunk: text for name, text in said.items() for chunk in written[name]}
