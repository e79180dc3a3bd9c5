"""What one device draws for the whole batch is what every plan draws, however layers are held, cut, and run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import piper
from piper import recipes, where
from piper.api.reference.verification import verify_strategy
from tests.helpers import parity

WIDTH, ROWS, STEPS = 6, 8, 2


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.linear(x)))


class Held(nn.Module):
    """Blocks in a container of modules, by itself no model."""

    def __init__(self, blocks: nn.ModuleList | nn.ModuleDict) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in (
            self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks
        ):
            x = block(x)
        return x * torch.bernoulli(torch.full((len(x), 1), 0.5))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "nn.Sequential": lambda: nn.Sequential(*(Residual() for _ in range(4))),
    "nn.ModuleDict": lambda: Held(nn.ModuleDict({f"b{k}": Residual() for k in range(4)})),
    "nn.ModuleList": lambda: Held(nn.ModuleList(Residual() for _ in range(4))),
    "opaque": lambda: piper.tag(
        nn.Sequential(*(Residual() for _ in range(4))), {"1": dict(opaque=True)}
    ),
}


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)[rows.start : rows.stop] + step / 7
    return x, x.flip(-1)


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


@cache
def job(model: str, draws: Literal["rows", "microbatches"] = "rows") -> piper.Job:
    wide = piper.Precision(params="float64")
    return piper.Job(
        MODELS[model],
        batch,
        nn.functional.mse_loss,
        sgd,
        global_batch=ROWS,
        precision=wide,
        draws=draws,
    )


def micro(microbatches: int) -> piper.Directive:
    return piper.split(where(), microbatches=microbatches)


AGAIN = piper.recompute(where(), keep="inputs")
PLANS: dict[str, tuple[dict[str, int], tuple[Any, ...]]] = {
    "one microbatch": ({}, (micro(1),)),
    "four": ({}, (micro(4),)),
    "partition(1)": ({}, (piper.partition(1), micro(2))),
    "1f1b": ({"pp": 2}, recipes.one_f_one_b(pp=2, microbatches=2)),
    "zbv": ({"pp": 2}, recipes.zbv(pp=2, microbatches=4)),
    "replicas": ({"dp": 2}, (micro(2), *recipes.data_parallel())),
    "zero": ({"dp": 4}, recipes.data_parallel(zero=3)),
    "recompute": ({"pp": 2}, (*recipes.one_f_one_b(pp=2, microbatches=4), AGAIN)),
}


def run(of: piper.Job, plan: str, steps: int = STEPS, **more: Any) -> piper.Run:
    sizes, directives = PLANS[plan]
    compiled = piper.compile(of, piper.Strategy(piper.Mesh(**sizes), directives))
    return piper.execute(compiled, steps=steps, launcher="inline", memory=False, **more)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model", MODELS)
def test_every_plan_draws_what_one_device_draws_for_the_whole_batch(model: str) -> None:
    one = parity.reference(job(model), steps=STEPS)
    assert one.losses != parity.reference(replace(job(model), seed=1), steps=STEPS).losses
    for plan in PLANS:
        parity.assert_parity(run(job(model), plan, gradients=True), one, label=plan)


def test_a_run_goes_on_with_the_same_masks_at_other_rows_per_microbatch(tmp_path: Path) -> None:
    one = parity.reference(job("nn.Sequential"), steps=4)
    first = run(job("nn.Sequential"), "1f1b", checkpoint=piper.Checkpoints(tmp_path))
    rest = run(
        job("nn.Sequential"), "four", checkpoint=piper.Checkpoints(tmp_path), resume="latest"
    )
    assert [*first.losses, *rest.losses] == pytest.approx(one.losses, rel=1e-12)


def test_torchs_own_numbers_do_not_depend_on_the_cut_and_do_on_the_microbatches() -> None:
    theirs = job("nn.Sequential", "microbatches")
    two = verify_strategy(
        theirs,
        piper.Strategy(piper.Mesh(pp=2), recipes.one_f_one_b(pp=2, microbatches=2)),
        steps=STEPS,
    )
    assert two.equal and two.equal_whole_batch is None and "torch's own generator" in two.text()
    losses = {
        plan: run(theirs, plan).losses for plan in ("1f1b", "partition(1)", "replicas", "four")
    }
    assert losses["1f1b"] == pytest.approx(losses["partition(1)"]) and losses[
        "replicas"
    ] == pytest.approx(losses["four"])
    assert losses["1f1b"] != pytest.approx(losses["four"])


def test_a_job_names_what_it_can_draw_by() -> None:
    with pytest.raises(
        piper.PiperError, match=r"""Job\(draws='fast'\): "rows" is needed, or "microbatches" """
    ):
        replace(job("nn.Sequential"), draws="fast")  # type: ignore[arg-type]  # on purpose
