"""A profile copies rows in place of an exchange of experts, and writes all rows that a device is to get."""

from __future__ import annotations

from math import nan
from typing import cast

import torch

from piper_ir.plan.plan import Plan
from piper_ops.experts.packed import Cuts
from piper_runtime.profile.profiler import _copied
from tests.helpers.cases import each_case


@each_case(("sent", "got"), [([0, 2], [0, 3]), ([0, 3], [0, 2]), ([1, 1], [0, 0])])
def test_no_row_that_is_read_is_what_memory_held(sent: list[int], got: list[int]) -> None:
    """Rows of messages that nobody reads are not filled, and may hold anything."""
    given, into = torch.full((4, 2), nan), torch.full((4, 2), nan)
    given[: sum(sent)] = 1.0
    found = _copied(cast(Plan, None), "all_to_all", "ep", given, Cuts(into, sent, got))
    assert found is into and bool(found[: sum(got)].isfinite().all())
    assert bool((found[: min(sum(sent), sum(got))] == 1).all()), "and what it sends is what it gets"
