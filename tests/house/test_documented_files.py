"""The Python of docs/your_model.md runs as it stands; here with a small model in the place of transformers' own.

Its rows about DDP and FSDP are compared with the loop that such a user has.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.api.reference.verification import verify_strategy

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "your_model.md").read_text()
BLOCKS = [
    b
    for b in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    if "eval_every" not in b
]


class Decoder(nn.Module):
    """Layers under the names of transformers' decoders, and their own loss."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.model.layers = nn.ModuleList(
            nn.Linear(width, width) for _ in range(config.num_hidden_layers)
        )
        self.lm_head = nn.Linear(width, config.vocab_size)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.model.embed_tokens(input_ids)
        for layer in self.model.layers:
            x = x + layer(x).tanh()
        logits = self.lm_head(x)
        return nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        ), logits


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the names that each block leaves behind; the second goes on from the first."""
    stands_in: Any = ModuleType("transformers")
    stands_in.LlamaConfig = SimpleNamespace
    stands_in.AutoModelForCausalLM = SimpleNamespace(from_config=Decoder)
    monkeypatch.setitem(sys.modules, "transformers", stands_in)
    names: dict[str, Any] = {}
    found = []
    for block in BLOCKS:
        exec(compile(block, "docs/your_model.md", "exec"), names)
        found.append(dict(names))
    return found


@pytest.mark.long
def test_the_files_train_what_one_device_trains(written: list[dict[str, Any]]) -> None:
    assert len(written) == 2
    for file in written:
        assert verify_strategy(file["job"], file["strategy"], steps=1).equal


def test_the_tags_say_the_stages(written: list[dict[str, Any]]) -> None:
    made = piper.compile(written[1]["job"], written[1]["strategy"])
    layers = {
        c.coords["layer"]: c.coords["stage"] for c in made.program.chunks if "layer" in c.coords
    }
    assert layers == {k: k // 4 for k in range(8)}


ROWS_OF_BATCH, WIDTH, STEPS = 8, 6, 3


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """A dataset such as DistributedSampler and DataLoader read."""

    def __init__(self) -> None:
        drawn = torch.randn(
            2,
            STEPS * ROWS_OF_BATCH,
            WIDTH,
            generator=torch.Generator().manual_seed(3),
            dtype=torch.float64,
        )
        self.x, self.y = drawn

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
    ).double()


def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.1)


def by_hand(batch: Any) -> list[float]:
    """Return the losses of two processes of DDP with two steps of accumulation, clip_grad_norm_ and a scheduler."""
    torch.manual_seed(0)
    model = network()
    made = optimizer([*model.named_parameters()])
    schedule = torch.optim.lr_scheduler.StepLR(made, 1, 0.5)
    losses = []
    for step in range(STEPS):
        made.zero_grad()
        parts = []
        for process in range(2):
            for turn in range(2):
                first = 4 * process + 2 * turn
                x, y = batch(step, range(first, first + 2))
                parts.append(nn.functional.mse_loss(model(x), y) / 4)
                parts[-1].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        made.step()
        schedule.step()
        losses.append(sum(part.item() for part in parts))
    return losses


@pytest.mark.parametrize("there", ["DistributedDataParallel", "fully_shard"])
def test_rows_of_the_page_about_ddp_and_fsdp(there: str) -> None:
    """The expression is read from the page."""
    (row,) = (line for line in PAGE.splitlines() if line.startswith("|") and f"`{there}(" in line)
    (expression,) = re.findall(r"`(piper\.recipes\.data_parallel\(.*?\))`", row)
    job = piper.Job(
        network, piper.from_dataset(Rows(), shuffle=False), nn.functional.mse_loss, optimizer, ROWS_OF_BATCH,
        scheduler=lambda made: torch.optim.lr_scheduler.StepLR(made, 1, 0.5), clip_norm=0.05,
        precision=piper.Precision(params="float64"),
    )  # fmt: skip
    recipe = [piper.split(piper.where(), microbatches=2), *eval(expression, {"piper": piper})]
    run = piper.execute(
        piper.compile(job, piper.Strategy(piper.Mesh(dp=2), recipe)), steps=STEPS, launcher="inline"
    )
    assert run.losses == pytest.approx(by_hand(job.batch), rel=1e-9)
