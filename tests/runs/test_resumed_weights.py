"""A resumed run has all weights of its checkpoint, also those that nothing trains or uses, in any precision."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.api.compiling.compiling import Compiled
from piper.api.reference.reference_weights import load_weights
from piper_ir.ground.errors import FormatError, JobError
from piper_runtime.checkpoint import convert
from piper_runtime.rank import materialize
from piper_runtime.weights import stored_tensors
from tests.helpers.safetensors_writer import write_safetensors


class Odd(nn.Module):
    """A frozen weight, a parameter without elements, one and a buffer that nothing uses, and a buffer that the model
    reads."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.layers[1].weight.requires_grad_(False)
        self.spare = nn.Parameter(torch.randn(3))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("unread", torch.randn(4))
        self.register_buffer("factor", torch.ones(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh() * self.factor.to(x.dtype)
        return x + self.empty.sum()


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))[rows.start : rows.stop]
    return x, x.roll(1, 1)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target.float()).square().mean()


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.01)


@cache
def compiled() -> Compiled:
    job = piper.Job(
        Odd, batch, loss, adamw, global_batch=4, precision=piper.Precision(compute="bfloat16")
    )
    return piper.compile(job, piper.Strategy(piper.Mesh(dp=2), piper.recipes.data_parallel(zero=1)))


def run(steps: int, **options: Any) -> Any:
    return piper.execute(compiled(), steps=steps, launcher="inline", **options)


def test_a_resumed_run_is_one_without_a_pause(tmp_path: Path) -> None:
    whole = run(3)
    run(2, checkpoint=piper.Checkpoints(tmp_path))
    found = run(1, checkpoint=piper.Checkpoints(tmp_path), resume="latest")
    a, b = whole.state_dict(), found.state_dict()
    assert found.losses == whole.losses[2:] and a.keys() == b.keys()
    assert [n for n in a if not torch.equal(a[n], b[n])] == []


def test_all_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """They have the frozen ones, too, and those that no rank holds: in the model after the run, and in its own
    checkpoints.

    A frozen one has all its bits there, though ranks compute with it in a narrower dtype.
    """
    other = {n: t + 1 for n, t in Odd().state_dict().items()}
    convert(write_safetensors(tmp_path / "other.safetensors", other), tmp_path / "begin")
    saved = piper.Checkpoints(tmp_path / "saved", keep=1)
    first = run(1, resume=tmp_path / "begin" / "step-00000000", checkpoint=saved)
    second = run(1, resume="latest", checkpoint=saved)
    convert(tmp_path / "saved", tmp_path / "end.safetensors")
    end = stored_tensors(tmp_path / "end.safetensors")
    for found in (
        first.state_dict(),
        second.state_dict(),
        {n: t.flat(0, prod(t.shape)).view(t.shape) for n, t in end.items()},
    ):
        for name in ("layers.1.weight", "spare", "unread"):
            assert torch.equal(found[name], other[name]), name


def test_a_resumed_run_needs_no_file_of_the_job(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "weights.safetensors", Odd().state_dict())
    made = compiled()
    job = replace(made.job, init=file)
    whole = run(2, job=job)
    run(1, job=job, checkpoint=piper.Checkpoints(tmp_path / "saved"))
    file.unlink()
    found = run(1, job=job, checkpoint=piper.Checkpoints(tmp_path / "saved"), resume="latest")
    assert found.losses == whole.losses[1:]
    with pytest.raises(JobError, match="no such file"):
        run(1, job=job)


def test_a_checkpoint_gives_initial_weights(tmp_path: Path) -> None:
    """Also as the file that it is converted into, with the buffers that a state_dict leaves out; the judge agrees."""
    done = run(1, checkpoint=piper.Checkpoints(tmp_path / "saved"))
    convert(tmp_path / "saved", tmp_path / "weights.safetensors")
    for init in (tmp_path / "saved" / "step-00000001", tmp_path / "weights.safetensors"):
        job = replace(compiled().job, init=init)
        state, judged = materialize(job), Odd()
        load_weights(judged, job)
        both = {**state.params, **state.buffers}
        assert both.keys() == {"factor", *done.state_dict()} and torch.equal(
            both["factor"], torch.ones(6)
        )
        for name, tensor in done.state_dict().items():
            assert torch.equal(both[name], tensor) and torch.equal(
                judged.state_dict()[name], tensor
            ), name
    with pytest.raises(JobError, match=r"nor the .metadata of a checkpoint; it has step-00000001"):
        materialize(replace(compiled().job, init=tmp_path / "saved"))
    (
        tmp_path / "saved" / "step-00000001" / "complete.json"
    ).unlink()  # which would say that the file is another one
    (tmp_path / "saved" / "step-00000001" / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(FormatError, match=r"it names os.system, which metadata does not need"):
        materialize(replace(compiled().job, init=tmp_path / "saved" / "step-00000001"))


class Sines(Odd):
    """A later version of the model, with the same parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sin()


def test_another_version_of_a_model_is_warned_of_and_another_strategy_is_not(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    run(2, checkpoint=piper.Checkpoints(tmp_path))
    job = compiled().job
    assert job is not None
    cut = piper.Strategy(piper.Mesh(tp=2), piper.recipes.tensor_parallel())
    whole = piper.Strategy(piper.Mesh())
    for other, strategy, said in (
        (job, cut, 0),
        (job, whole, 0),
        (replace(job, model=Sines), whole, 1),
    ):
        recwarn.clear()
        made = piper.compile(other, strategy)
        piper.execute(
            made,
            steps=1,
            launcher="inline",
            resume="latest",
            checkpoint=piper.Checkpoints(tmp_path, every=9),
        )
        assert sum("another program" in str(w.message) for w in recwarn) == said
