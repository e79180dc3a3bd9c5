"""The comparison of expert parallelism: torch's side computes the mixture, and both sides train the same."""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import expert_side, step_expert, step_placed
from benchmarks.expert_model import SMALL, initial
from benchmarks.step_sides import Ours, Setup
from benchmarks.step_worker import Measured, Timing, check_same_training
from piper_ir.tools import usable_cores
from piper_runtime.engine import core_share

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
    model: Any = initial(replace(TINY, dtype=dtype), seed=3)
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


def test_threads_that_read_sockets_get_the_policy_of_the_runtime() -> None:
    end = threading.Event()
    threads = [threading.Thread(target=end.wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    socket, other = ids = [thread.native_id or 0 for thread in threads]
    Path(f"/proc/self/task/{socket}/comm").write_text(step_placed.SOCKETS)
    try:
        step_placed.let_others_run({*ids})
        assert [os.sched_getscheduler(t) for t in ids] == [os.SCHED_BATCH, os.SCHED_OTHER]
        with pytest.raises(RuntimeError, match="torch has started no thread gloo_tcp_loop"):
            step_placed.let_others_run({other})
    finally:
        end.set()


def test_rows_of_placed_ranks_take_the_slower_rank_of_each_pair() -> None:
    def seconds(*each: float) -> list[Timing]:
        return [Timing(s, 0.0) for s in each]

    measured = [
        Measured(placed={"a way": seconds(2.0, 6.0, 3.0)}),
        Measured(placed={"a way": seconds(4.0, 2.0, 1.0)}),
    ]
    (row,) = step_expert.placed_rows("a mixture", measured, [2.0, 2.0, 2.0])
    assert row.name == "a mixture: torch on our cores, a way: torch/ours" and row.goal is None
    assert (row.value, row.note) == (2.0, "torch 4000.00 ms/step")


class WithoutExperts(expert_side.TorchMixture):
    """A side whose experts' gradients are zeros."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._world = math.inf


def both(setup: Setup, rank: int, store: str, pipe: Connection[Any, Any]) -> None:
    """Train both sides, torch's on cores of our launcher, and the broken one in one of two processes; send their
    losses.

    What the threads of torch's placed sides may use is sent too: cores and policy.
    """
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    files = dist.FileStore(store, 2)
    dist.init_process_group("gloo", store=dist.PrefixStore("torch", files), rank=rank, world_size=2)
    given: Any = setup.regime, setup.job.seed, setup.global_batch, rank
    plain = Ours(setup, rank, files), expert_side.TorchMixture(*given)
    before = step_placed._threads()
    with core_share(torch.device("cpu"), rank, 2):
        others = step_placed.placed(setup, rank)
    started = {
        (tuple(os.sched_getaffinity(t)), os.sched_getscheduler(t))
        for t in step_placed._threads() - before
    }
    sides = (*plain, *others.values(), WithoutExperts(*given))
    for _ in range(STEPS):
        for side in sides:
            side.step()
    pipe.send(([side.losses for side in sides], started))
    dist.barrier()
    os._exit(0)


@pytest.mark.long
def test_both_sides_train_the_same_mixture(tmp_path: Path) -> None:
    setup = step_expert.prepared(TINY, tolerance=1e-9)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    for rank, (_, its) in enumerate(pipes):
        context.Process(
            target=both, args=(setup, rank, str(tmp_path / "store"), its), daemon=True
        ).start()
    used: set[int] = set()
    for ours, _ in pipes:
        assert ours.poll(240), "a process failed; its output is above"
        losses, started = ours.recv()
        made, *right, broken = (type("Losses", (), {"losses": found}) for found in losses)
        assert len(made.losses) == STEPS and len(right) == 1 + len(step_placed.WAYS)
        for side in right:
            check_same_training(made, side, setup.tolerance)
        with pytest.raises(RuntimeError, match="the two sides do not train the same"):
            check_same_training(made, broken, setup.tolerance)
        cores = {cores for cores, _ in started}
        assert len(cores) == 1 and {policy for _, policy in started} == {
            os.SCHED_OTHER,
            os.SCHED_BATCH,
        }
        used |= set(*cores)
    assert len(used) == usable_cores(), "each rank has a share of its own"
