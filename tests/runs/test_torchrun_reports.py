"""Reports of ranks under torchrun: each tensor is sent once, and every rank gets what one device trains."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import piper
from piper import ANY, Mesh, Strategy, recipes, shard, where
from piper.api.compiling.compiling import Compiled
from piper_runtime.launch.ground.report import RankReport
from piper_runtime.launch.torchrun.joined import joined_states
from piper_runtime.launch.torchrun.torchrun import without_copies
from piper_runtime.rank.values.layouts import own_parts
from tests.helpers import shared_jobs
from tests.helpers.cases import each_case

TENSOR = (shard(where(), over="tp"), *recipes.data_parallel())
EXPERTS = (
    shard(where(experts=ANY), over="ep", index="experts", stream="rows"),
    *recipes.data_parallel(over=("dp", "ep")),
)
LAYOUTS: dict[str, tuple[str, Mesh, Sequence[Any], int]] = {
    "replicas": ("gpt", Mesh(dp=2), TENSOR[1:], 1),
    "parts": ("gpt", Mesh(tp=2), TENSOR, 2),
    "parts in replicas": ("gpt", Mesh(dp=2, tp=2), TENSOR, 2),
    "replicas of parts": ("gpt", Mesh(tp=2, dp=2), TENSOR, 2),
    "experts": ("dropless", Mesh(dp=2, ep=2), EXPERTS, 2),
}
"""Models, strategies, and how many ranks must send their tensors."""


def made(name: str) -> Compiled:
    model, mesh, directives, _ = LAYOUTS[name]
    return piper.compile(shared_jobs.job(model), Strategy(mesh, directives))


@each_case("name", list(LAYOUTS))
def test_parts_of_the_first_replica_are_sent_and_join_to_the_model(name: str) -> None:
    plan = made(name).plan
    whole = {p: torch.randn(shape) for p, shape in plan.whole_shapes.items()}
    reports = {
        rank: without_copies(RankReport(states=dict(own_parts(plan, rank, whole))), plan, rank)
        for rank in range(plan.mesh.world)
    }
    sent = [rank for rank, report in reports.items() if report.states]
    assert len(sent) == LAYOUTS[name][3] and sent[0] == 0
    joined = joined_states(plan, reports)
    assert all(torch.equal(joined[rank][p], whole[p]) for rank in sent for p in whole)


RANK = """
import sys
sys.path[:0] = {path!r}
from tests.helpers import shared_jobs
from tests.runs.test_torchrun_reports import LAYOUTS, made
compiled = made({name!r})
found = shared_jobs.run(compiled, launcher="processes", timeout_s=60)
shared_jobs.assert_equal(LAYOUTS[{name!r}][0], compiled, found)
"""


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_of_torchrun_has_what_one_device_trains(name: str, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(RANK.format(path=sys.path, name=name))
    ranks = str(made(name).plan.mesh.world)
    way = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, str(file)]
    done = subprocess.run([sys.executable, *way], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
