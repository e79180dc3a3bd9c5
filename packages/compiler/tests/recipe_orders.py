"""What the directives of a recipe ask for, as a table per device: read back from the directives, not from the
recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from packages.compiler.tests.order_validator import Did
from piper_compiler import Directive
from piper_compiler.directives.order import Order
from piper_compiler.directives.place import Place
from piper_ir.ground.select import Where


def orders_of_directives(directives: Sequence[Directive]) -> list[list[tuple[Did, ...]]]:
    """One row per device of the axis pp, of those that have an order."""
    homes: dict[tuple[int, int | None], int] = {}  # (stage, microbatch), or (stage, None) for all
    rows: dict[int, list[tuple[Did, ...]]] = {}
    for item in directives:
        if isinstance(item, Place):
            terms = _terms(item.selection)
            for mb in terms.get("mb", (None,)):
                homes[terms["stage"], mb] = dict(item.on)["pp"]
        elif isinstance(item, Order):
            slots = [tuple([Did(**_terms(s)) for s in group]) for group in item._items()]
            first = slots[0][0]
            home = (
                homes[first.stage, None]
                if (first.stage, None) in homes
                else homes[first.stage, first.mb]
            )
            assert home not in rows, f"device {home} has two orders"
            rows[home] = slots
    return [rows[d] for d in sorted(rows)]


def _terms(selection: Where) -> dict[str, Any]:
    return dict(selection.terms)
