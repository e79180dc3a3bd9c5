"""Whole models on CUDA: numbers of one device and memory of the plan. Skipped where there is no device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from piper_runtime.device import NO_CUDA, using
from piper_runtime.processes import Pool
from tests import compositions, parity
from tests.compositions import Composition, fitted
from tests.test_memory_truth import lies, measure

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA),
    pytest.mark.usefixtures("on_cuda"),
]

PARITY = [
    Composition("gpt", 2, 1, 4, "1f1b", clip=0.05),
    Composition("gpt", 2, 2, 4, "1f1b", optimizer="adamw", bucket_mb=0.003, clip=0.05, scheduler=True),
    Composition("gpt_untied", 4, 1, 4, "1f1b"),
    Composition("llama", 1, 2, 2, "gpipe", optimizer="adamw"),
    Composition("skip", 4, 1, 4, "random", "random", shared_streams=True, seed=2),
    Composition("keywords", 2, 2, 4, "1f1b", rows=1),
]


@pytest.fixture(autouse=True)
def on_cuda() -> Iterator[None]:
    with using("cuda"):
        yield


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4) as workers:
        yield workers


@pytest.mark.parametrize("launcher", ["inline", "processes"])
@pytest.mark.parametrize("c", PARITY, ids=str)
def test_parity_in_float64(c: Composition, launcher: str, pool: Pool) -> None:
    c = fitted(c)
    plan = compositions.compiled(c).plan
    run = compositions.run(c, plan, launcher=launcher, **({"pool": pool} if launcher == "processes" else {}))
    parity.assert_parity(run, compositions.expected(c), label=repr(c))


@pytest.mark.parametrize("c", [Composition("gpt", 2, 1, 8, "1f1b"), Composition("mlp", 1, 2, 2)], ids=str)
def test_memory_is_what_the_plan_says(c: Composition, pool: Pool) -> None:
    """Storages as the dispatcher shows them, in one process; kernels for attention without a mask differ from the CPU's in what
    they allocate inside, which neither counts."""
    found = lies(*measure(c))
    assert not found, "\n".join(found[:6])
