"""A GPT on sentences of a file, with a dataset and a collate function as for torch's DataLoader.

python examples/gpt_dataset.py         train 40 steps on two processes, with the batches made in a process beside each
piper run examples/gpt_dataset.py      the same on Ray, with predicted beside measured
piper verify examples/gpt_dataset.py   the same rows and gradients as one device

The file is written on first use: 4,000 made-up sentences of different lengths.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import piper
from piper.models import GPTConfig

FILE = Path(tempfile.gettempdir()) / "piper_sentences.txt"
SENTENCES, LENGTH, VOCAB = 4000, 64, 128
PAD = 0
WORDS = (
    ("the", "a", "every", "no"),
    ("small", "old", "quiet", "green", "very large"),
    ("ship", "river", "engine", "teacher", "mountain"),
    ("carries", "follows", "finds", "repairs"),
    ("stones", "two letters", "the morning train", "what it lost"),
)


def sentence(number: int) -> str:
    """Return a sentence; equal numbers give equal ones."""
    draw = random.Random(number)
    words = [draw.choice(choices) for choices in WORDS]
    return " ".join(w for w in words if draw.random() < 0.9)


class Lines(Dataset[Tensor]):
    """The lines of a file as bytes; where they begin is found once per process, the text stays in the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.exists():
            whole = path.with_suffix(f".{random.randrange(2**32)}")
            whole.write_text(
                "".join(f"{sentence(i)}\n" for i in range(SENTENCES)), encoding="ascii"
            )
            whole.replace(path)  # so that no other process sees half of it
        ends = [i for i, byte in enumerate(path.read_bytes()) if byte == ord("\n")]
        self._spans = list(zip([0, *(e + 1 for e in ends)], ends, strict=False))

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, i: int) -> Tensor:
        start, end = self._spans[i]
        with self._path.open("rb") as file:
            file.seek(start)
            return torch.tensor(list(file.read(end - start)))


def collate(lines: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Pad lines to one length; the targets are the next bytes, int64 [rows, LENGTH] as the inputs."""
    ids = torch.full((len(lines), LENGTH + 1), PAD)
    for row, line in zip(ids, lines, strict=True):
        row[: len(line)] = line[: LENGTH + 1]
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over the bytes that are no padding, and their number."""
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    real = (targets.flatten() != PAD).to(each.dtype)
    return (each * real).sum(), real.sum()


def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=3e-3)


def model() -> nn.Module:
    return GPTConfig(layers=4, width=64, heads=4, vocab=VOCAB, length=LENGTH).build()


dataset = Lines(FILE)
job = piper.Job(
    model,
    piper.from_dataset(dataset, collate, seed=0),
    loss,
    optimizer,
    global_batch=32,
    tokens_per_row=LENGTH,
)
strategy = piper.Strategy(piper.Mesh(pp=2), piper.recipes.one_f_one_b(pp=2, microbatches=4))
steps = 40


def main() -> None:
    run = piper.execute(
        piper.compile(job, strategy), steps=steps, launcher="processes", loader="processes"
    )
    (inputs, _), *_ = DataLoader(dataset, batch_size=8, collate_fn=collate)
    print(
        f"a DataLoader's first batch: {tuple(inputs.shape)}; loss {run.losses[0]:.3f} -> {run.losses[-1]:.3f} nats "
        f"per byte"
    )


if __name__ == "__main__":
    main()
