"""The comparison of expert parallelism: torch's side computes the mixture, and both sides train the same."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import expert_side, step_time
from benchmarks.expert_side import SMALL
from benchmarks.step_sides import Ours, Setup
from benchmarks.step_worker import check_same_training

TINY = replace(
    SMALL,
    width=16,
    heads=2,
    layers=2,
    context=8,
    rows=2,
    hidden=12,
    experts=4,
    top_k=2,
    dtype="float64",
)
STEPS = 3


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_torchs_experts_compute_the_mixture_with_either_product(alone: None, dtype: str) -> None:
    torch.manual_seed(3)
    model: Any = TINY.config.build().to(getattr(torch, dtype))
    ours = model.layers[0].feed_forward
    theirs = expert_side.TorchExperts(ours, dist.group.WORLD)
    x = torch.randn(2, 8, 16, dtype=getattr(torch, dtype))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    made = [part(given) for part, given in zip((ours, theirs), inputs, strict=True)]
    above = torch.randn_like(x)
    for result in made:
        result.backward(above)
    close = dict(rtol=1e-9, atol=1e-12) if dtype == "float64" else dict(rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(*made, **close)
    torch.testing.assert_close(*(given.grad for given in inputs), **close)
    for name in expert_side.STACKS:
        torch.testing.assert_close(getattr(theirs, name).grad, getattr(ours, name).grad, **close)
    with torch.no_grad():
        theirs.up[1] *= 1.01
    assert not torch.allclose(theirs(x), made[0], **close)


def test_blocks_change_their_order() -> None:
    rows = torch.arange(6.0).unsqueeze(1)
    turned = expert_side._turned(rows, [[1, 2], [0, 3]])
    assert turned.squeeze(1).tolist() == [0, 1, 2, 3, 4, 5]
    assert expert_side._turned(rows, [[1, 2], [3, 0]]).squeeze(1).tolist() == [0, 3, 4, 5, 1, 2]


class WithoutExperts(expert_side.TorchMixture):
    """A side whose experts' gradients are zeros."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._world = math.inf


def both(setup: Setup, rank: int, store: str, pipe: Connection[Any, Any]) -> None:
    """Train both sides, and the broken one, in one of two processes; send their losses."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    files = dist.FileStore(store, 2)
    dist.init_process_group("gloo", store=dist.PrefixStore("torch", files), rank=rank, world_size=2)
    sides = (
        Ours(setup, rank, files),
        expert_side.TorchMixture(setup, rank),
        WithoutExperts(setup, rank),
    )
    for _ in range(STEPS):
        for side in sides:
            side.step()
    pipe.send([side.losses for side in sides])
    dist.barrier()
    os._exit(0)


@pytest.mark.long
def test_both_sides_train_the_same_mixture(tmp_path: Path) -> None:
    setup = step_time.experts(TINY, tolerance=1e-9)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    for rank, (_, its) in enumerate(pipes):
        context.Process(
            target=both, args=(setup, rank, str(tmp_path / "store"), its), daemon=True
        ).start()
    for receive, _ in pipes:
        assert receive.poll(240), "a process failed; its output is above"
        ours, torchs, broken = (SimpleNamespace(losses=losses) for losses in receive.recv())
        assert len(ours.losses) == STEPS
        check_same_training(ours, torchs, setup.tolerance)
        with pytest.raises(RuntimeError, match="the two sides do not train the same"):
            check_same_training(ours, broken, setup.tolerance)
