"""What `piper simulate` and `piper.advice` say of a plan that does not fit: a change that makes it fit, which really
does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import piper
from piper.api.captures import capturing
from piper.api.problems.advice import changes
from piper.cli.actions import predicting
from piper.models import GPTConfig
from piper_ir.ground.errors import PiperError
from piper_simulator import load_cluster
from tests.cli.test_cli import piper as command

SIZES = GPTConfig(layers=4, width=64, heads=4, vocab=96, length=64)
FILE = """
import piper
from piper.models import GPTConfig
made = piper.models.job(GPTConfig(layers=4, width=64, heads=4, vocab=96, length=64), global_batch=16)
OPEN = open(__file__)
def model(build=made.model, holding=OPEN):
    return build()
job = piper.Job(model, made.batch, made.loss, made.optimizer, global_batch=16, precision=made.precision)
strategy = piper.Strategy(piper.Mesh(pp=2, dp=2), (*piper.recipes.gpipe(pp=2, microbatches=4), *piper.recipes.data_parallel()))
"""


@pytest.fixture(scope="module")
def job() -> piper.Job:
    return piper.models.job(SIZES, global_batch=16)


def strategy() -> piper.Strategy:
    stages = piper.recipes.gpipe(pp=2, microbatches=4)
    return piper.Strategy(piper.Mesh(pp=2, dp=2), (*stages, *piper.recipes.data_parallel()))


def holding(nbytes: int) -> piper.Cluster:
    """Return a cluster whose devices hold so many bytes of tensors, and nothing else."""
    nothing = {"context_bytes": 0, "group_bytes": 0, "p2p_bytes": 0, "allocator_factor": 1.0}
    return load_cluster("h100x8").each_device(
        lambda device: replace(device, memory_bytes=nbytes, **nothing)
    )


def held(job: piper.Job, made: piper.Strategy, cluster: piper.Cluster) -> int:
    return max(piper.simulate(piper.compile(job, made).plan, cluster).device_bytes)


@pytest.mark.long
def test_the_first_change_that_fits_is_named_with_what_it_costs(job: piper.Job) -> None:
    large = holding(1 << 40)
    least = held(job, strategy(), large)
    found = {
        words: held(job, made, large) for words, made in changes(strategy()) if legal(job, made)
    }
    first, limit = next(
        (words, nbytes) for words, nbytes in found.items() if "half the rows" in words
    )
    assert limit < least, "fewer rows per microbatch hold less"
    earlier = [nbytes for words, nbytes in found.items() if words != first][
        : list(found).index(first)
    ]
    limit = min([limit, *earlier])
    expected = next(words for words, nbytes in found.items() if nbytes <= limit)
    way = piper.advice(job, strategy(), holding(limit)).way_out
    assert way is not None and way.change is not None and way.change.words == expected
    made = way.change.strategy
    assert (
        made is not None
        and held(job, made, large)
        == way.change.after.device_bytes
        <= limit
        < way.change.before.device_bytes
    )
    assert any(
        "it fits" in line for line in piper.advice(job, strategy(), holding(limit)).lines(1.0)
    )


def legal(job: piper.Job, made: piper.Strategy) -> bool:
    try:
        return made.mesh.world <= 8 and piper.compile(job, made).plan is not None
    except PiperError:
        return False


@pytest.mark.long
def test_a_plan_that_fits_needs_no_way_out_and_one_that_nothing_helps_is_told_what_holds_least(
    job: piper.Job,
) -> None:
    assert piper.advice(job, strategy(), holding(1 << 40)).way_out is None
    found = piper.advice(job, strategy(), holding(100))
    assert found.way_out is not None and found.way_out.change is None and found.way_out.tried > 8
    assert found.lines(1.0)[-1].startswith(
        f"none of {found.way_out.tried} changes of recomputation, zero,"
    )


def test_changes_keep_the_batch_and_are_each_another_strategy() -> None:
    tried = dict(changes(strategy()))
    assert strategy() not in tried.values()
    words = " ".join(tried)
    for kind in (
        'keep="inputs"',
        "replicate(zero=3)",
        "half the rows",
        'offload(where(), tensors="states")',
        "tp=2, dp=1",
        "one_f_one_b(pp=2",
    ):
        assert kind in words, kind
    assert "gpipe(pp=2, microbatches=8)" in words, (
        "the recipe is written anew for twice the microbatches"
    )
    assert any('keep="inputs"' in text and "zero=3" in text and "tp=2" in text for text in tried), (
        "the strongest together"
    )


@pytest.mark.long
def test_a_command_captures_once_and_prints_its_table_before_it_tries_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this model it cannot be told whether it is the one that was captured: it holds an open file."""
    path, captured = tmp_path / "held.py", []
    path.write_text(FILE)
    (tmp_path / "small.toml").write_text(
        'name = "small"\nnodes = { count = 1, devices = 8 }\n[device]\nbase = '
        '"h100-80g-sxm"\nmemory_bytes = 900_000\n'
    )
    capture = capturing._capture
    monkeypatch.setattr(capturing, "_capture", lambda *given: captured.append(1) or capture(*given))
    done = command("simulate", path, "--cluster", tmp_path / "small.toml", "--why", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["way_out"]["tried"] > 0
    assert captured == [1]

    def refused(*given: Any, **more: Any) -> None:
        raise PiperError("no advice today")

    monkeypatch.setattr(predicting, "advice", refused)
    done = command("simulate", path, "--cluster", "h100x8")
    assert (
        done.exit_code == 2
        and "memory of the fullest device" in done.stdout
        and "no advice today" in done.stderr
    )
