"""Shared states, mixed precision, recomputation, saving and forked workers on CUDA. Skipped where there is no
device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist

import piper
from benchmarks import gpu_states
from benchmarks.gpu import joined_pool
from benchmarks.gpu_hazards import CYCLES
from benchmarks.gpu_states import MasterLoop
from benchmarks.step_model import Regime
from piper import Mesh, Precision, Strategy, models
from piper_runtime.checkpoint.host_copies import HostCopies
from piper_runtime.checkpoint.rank_tensors import FlatState
from piper_runtime.launch.processes import forking
from piper_runtime.launch.processes.processes import Pool
from piper_runtime.rank.values.device import NO_CUDA, using
from tests.helpers import compositions, parity
from tests.helpers.compositions import Composition, fitted
from tests.parity import test_mixed_precision
from tests.parity.test_mixed_precision import BF16, CASES, LARGE, MICROBATCHES, SIZES

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA),
    pytest.mark.usefixtures("on_cuda"),
]
DEVICE = "cuda"
JOINED = ["nccl", "gloo"] if dist.is_nccl_available() else ["gloo"]
"""What joins ranks that share a device."""
PARITY = [
    Composition("gpt", 2, 2, 4, "1f1b", optimizer="adamw", bucket_mb=0.002, clip=0.05, zero=1),
    Composition("gpt", 2, 2, 4, "1f1b", optimizer="adamw", bucket_mb=0.002, clip=0.05, zero=2),
    Composition("gpt", 2, 2, 4, "1f1b", optimizer="adamw", bucket_mb=0.002, clip=0.05, zero=3),
    Composition("gpt_untied", 2, 2, 4, "zbv", bucket_mb=0.002, zero=3, prefetch=2),
    Composition("llama", 2, 2, 4, "zbv", bucket_mb=0.002, zero=2, keep="inputs"),
    Composition("llama", 1, 4, 2, "gpipe", bucket_mb=0.002, zero=3, rep=2, keep="products"),
    Composition("opaque", 2, 2, 4, "1f1b", bucket_mb=0.002, zero=3, keep="inputs"),
]
SMALL = Regime("tests", width=128, heads=4, layers=4, context=32, rows=2, microbatches=4, steps=1)
"""Of a GPT whose buckets are large beside what a step holds for itself."""


@pytest.fixture(autouse=True)
def on_cuda() -> Iterator[None]:
    with using(DEVICE):
        yield


@pytest.fixture(scope="module", params=JOINED)
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with joined_pool(4, request.param) as workers:
        yield workers


@pytest.fixture
def in_processes(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What runs a job, which the tests on the CPU then use, too."""

    def run_of(job: piper.Job, strategy: Strategy, steps: int) -> Any:
        compiled = piper.compile(job, strategy)
        return piper.execute(
            compiled, steps=steps, launcher="processes", pool=pool, gradients=True, memory=False
        )

    monkeypatch.setattr(test_mixed_precision, "run_of", run_of)
    return run_of


# --- states that ranks share


@pytest.mark.parametrize("c", PARITY, ids=str)
def test_shared_states_and_recomputation_have_the_numbers_of_one_device(
    c: Composition, pool: Pool
) -> None:
    c = fitted(c)
    run = compositions.run(c, compositions.compiled(c).plan, launcher="processes", pool=pool)
    parity.assert_parity(run, compositions.expected(c), label=repr(c))


@pytest.mark.parametrize("how", JOINED)
def test_gathers_and_scatters_keep_nothing_beyond_the_plan(how: str) -> None:
    rows = list(gpu_states.sharded(DEVICE, (how,), SMALL))
    assert len(rows) == 3 * 13
    assert not (
        missed := [
            (row.name, row.value, row.note)
            for row in rows
            if row.section == "sharded" and not row.met
        ]
    ), missed
    assert all(abs(row.value) < 3 for row in rows if row.section == "memory"), rows


# --- mixed precision


@pytest.mark.parametrize("c", CASES[:4], ids=str)
def test_the_mixed_path_is_the_plain_loop_with_the_same_casts(c: Composition, pool: Pool) -> None:
    c = test_mixed_precision.mixed(c)
    run = compositions.run(c, compositions.compiled(c).plan, launcher="processes", pool=pool)
    parity.assert_parity(run, compositions.expected(c), parity.FLOAT32, label=repr(c))


@pytest.mark.parametrize(("axes", "microbatches"), [({}, 3), ({"dp": 3}, 1)])
@pytest.mark.parametrize(("reduce", "gradient"), [("float32", 1.0), ("bfloat16", 0.0)])
def test_256_and_1_less_256_is_1(
    axes: dict[str, int],
    microbatches: int,
    reduce: str,
    gradient: float,
    in_processes: Callable[..., Any],
) -> None:
    """Three ranks may add in another order, in which 256 and -256 come first; one rank adds in the order of
    microbatches."""
    test = test_mixed_precision
    job = piper.Job(
        test.Line, test.large_and_small, test.weighted, test.sgd, global_batch=len(LARGE),
        precision=Precision(params="float32", compute="bfloat16", reduce=reduce),
    )  # fmt: skip
    pieces = (
        piper.split(piper.where(), microbatches=microbatches),
        *(piper.recipes.data_parallel() if axes else ()),
    )
    found = in_processes(job, Strategy(Mesh(**axes), pieces), 1).gradients[0]["weight"].tolist()
    assert found == [gradient] or (reduce == "bfloat16" and axes and found in ([0.0], [1.0]))


@pytest.mark.usefixtures("in_processes")
def test_steps_below_half_an_ulp_move_parameters_as_float32_does() -> None:
    found, start = test_mixed_precision.moved(BF16)
    assert found.dtype == torch.float32 and bool((found != start).all())
    assert torch.equal(found, test_mixed_precision.moved(Precision(params="float32"))[0])
    found, start = test_mixed_precision.moved(Precision(params="bfloat16"))
    assert torch.equal(found, start), "negative control: without a master none moves"


@pytest.mark.parametrize("name", SIZES)
def test_gradients_of_bfloat16_are_as_good_as_torchs_on_the_device(
    name: str, in_processes: Callable[..., Any]
) -> None:
    work = models.job(SIZES[name], global_batch=8)
    exact = parity.reference(
        replace(work, precision=Precision(params="float64")), microbatches=MICROBATCHES, steps=1
    )
    plain = MasterLoop(work, torch.device(DEVICE), MICROBATCHES)
    plain.sum_up()
    run = in_processes(
        work, Strategy(Mesh(pp=2), piper.recipes.one_f_one_b(pp=2, microbatches=MICROBATCHES)), 1
    )
    theirs = plain.gradients()
    ratios = []
    for parameter, truth in exact.gradients[0].items():
        errors = [
            float((g.cpu().double() - truth).norm())
            for g in (run.gradients[0][parameter], theirs[parameter])
        ]
        ratios.append(errors[0] / errors[1])
    assert median(ratios) <= 1.05 and max(ratios) <= 1.3, ratios


# --- recomputation


def test_peaks_under_policies_of_recomputation_are_those_of_the_plan() -> None:
    sizes = {
        "gpt": models.GPTConfig(layers=2, width=512, heads=8, vocab=512, length=256),
        "llama": models.LlamaConfig(
            layers=2, width=512, heads=8, kv_heads=4, hidden=1024, vocab=512, length=256
        ),
    }
    for row in gpu_states.peaks(DEVICE, sizes):
        assert row.met or (row.unit == "% error" and abs(row.value) < 3), row


# --- saving beside training


@pytest.mark.parametrize("waits", [True, False])
def test_an_update_waits_for_the_copies_of_the_state(waits: bool) -> None:
    """Without the wait the copy has what the update wrote, because of a deliberate delay."""
    copies, state = HostCopies(torch.device(DEVICE, 0)), torch.ones(1 << 20, device=DEVICE)
    copies.copy([FlatState(state, ())])  # makes the stream and the pinned memory
    copies.settle()
    with torch.cuda.stream(copies._stream):
        torch.cuda._sleep(CYCLES)
    (found,) = copies.copy([FlatState(state, ())])
    assert found.is_pinned() and not copies._copied.query(), "the host waited"
    if waits:
        copies.hold()
    state.zero_()
    copies.settle()
    assert bool((found == 1).all()) == waits


def test_what_was_made_to_be_copied_lives_until_then() -> None:
    copies, state = HostCopies(torch.device(DEVICE, 0)), torch.ones(1 << 10, 1 << 10, device=DEVICE)
    copies.copy([FlatState(state.reshape(-1), ())])
    copies.settle()
    with torch.cuda.stream(copies._stream):
        torch.cuda._sleep(CYCLES)
    (found,) = copies.copy([FlatState(state.t().mul(2).t().reshape(-1), ())])
    others = [torch.zeros(1 << 20, device=DEVICE) for _ in range(4)]
    copies.settle()
    assert bool((found == 2).all()) and not any(bool(other.any()) for other in others)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_run_resumes_from_a_checkpoint_that_was_written_beside_its_steps(
    zero: int, pool: Pool, tmp_path: Path
) -> None:
    c = fitted(
        Composition(
            "gpt", 2, 2, 4, "1f1b", optimizer="adamw", bucket_mb=0.002, clip=0.05, zero=zero
        )
    )
    compiled = compositions.compiled(c)

    def run(steps: int, **more: Any) -> piper.Run:
        return piper.execute(
            compiled, steps=steps, launcher="processes", pool=pool, memory=False, **more
        )

    whole = run(4)
    run(3, checkpoint=piper.Checkpoints(tmp_path, every=2))
    rest = run(2, resume=tmp_path / "step-00000002")
    assert rest.losses == pytest.approx(whole.losses[2:], rel=parity.FLOAT64)
    wanted = whole.state_dict()
    assert all(
        float((t - wanted[n]).norm()) <= parity.FLOAT64 * float(wanted[n].norm())
        for n, t in rest.state_dict().items()
    )


# --- forked workers


def test_the_process_that_forks_workers_has_no_device(pool: Pool) -> None:
    """A process that is forked from one with a context cannot use CUDA."""
    pool.start()
    assert forking._server is not None
    folder = Path(f"/proc/{forking._server._process.pid}/fd")
    assert not [
        link for name in folder.iterdir() if (link := os.readlink(name)).startswith("/dev/nvidia")
    ]
