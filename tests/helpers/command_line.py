"""The command line in this process, for tests of what it prints and writes, and the recipe that they share."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner, Result

from piper.cli import app

RECIPE = """
import torch
from torch import nn
import piper
from piper import where

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

def batch(step, rows):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))[rows.start : rows.stop]
    return x, 2 * x

def optimizer(named):
    return torch.optim.SGD([p for _, p in named], lr=0.1)

job = piper.Job(MLP, batch, nn.functional.mse_loss, optimizer, global_batch=8, tokens_per_row=1)
"""
GOOD = "strategy = piper.Strategy(piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=2))\n"


def command(*args: object, **options: Any) -> Result:
    """Run the command with these arguments; `options` are those of `CliRunner.invoke`."""
    return CliRunner().invoke(app, [str(a) for a in args], **options)


def fails(result: Result, *words: str) -> None:
    """Assert exit code 2 and one message with all words, without traceback: only Exit may have been raised."""
    text = result.stderr
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in text
    for word in words:
        assert word in text, (word, text)
