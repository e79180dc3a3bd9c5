"""Two ranks that share the work of chunks (tp, cp, ep) on one CUDA device. Skipped where there is no device."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu_layouts
from piper_runtime.rank.values.device import NO_CUDA

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)


@pytest.mark.parametrize("how", gpu_layouts.ways())
@pytest.mark.parametrize("name", gpu_layouts.cases())
def test_bfloat16_is_that_of_one_rank_and_memory_that_of_the_plan(name: str, how: str) -> None:
    rows = list(gpu_layouts.shared_work("cuda", (how,), {name: gpu_layouts.cases()[name]}))
    assert len(rows) == 3
    assert not (missed := [(row.name, row.value, row.note) for row in rows if not row.met]), missed
