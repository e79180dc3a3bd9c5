"""print, logging, warnings and asserts in forward run once, at capture, and it is said so."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import where
from piper.api.reference.verification import verify_strategy
from piper.views.explained.explain import explain
from piper_capture.torch_api import _torch_said
from piper_ir.ground.errors import CaptureError
from tests.helpers.capture_jobs import sgd

ROWS, LENGTH, WIDTH = 4, 3, 8
SPLIT = piper.Strategy(piper.Mesh(), (piper.split(where(), microbatches=2),))
log = logging.getLogger("tests.statements")


class Net(nn.Module):
    def __init__(self, quiet: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.quiet = quiet

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1:] == (LENGTH, WIDTH), f"a batch of shape {x.shape}"
        if not self.quiet:
            print("a batch of", x.shape, "with", x.shape[0] * 2, f"and {x}")
            warnings.warn("slow path", FutureWarning, stacklevel=2)
        for layer in self.layers:
            x = layer(x)
            log.info("after %s: mean %s", type(layer).__name__, x.mean())
            logging.debug("nothing to see")
        return x.mean(1)


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = (
        torch.linspace(-1, 1, ROWS * LENGTH * WIDTH).view(ROWS, LENGTH, WIDTH)[
            rows.start : rows.stop
        ]
        + step
    )
    return x, (x[:, 0, 0] * 10).long() % 3


def job(quiet: bool = False, batch: Any = batch) -> piper.Job:
    model = functools.partial(Net, quiet)
    return piper.Job(
        model, batch, F.cross_entropy, sgd, ROWS, precision=piper.Precision(params="float64")
    )


class Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    log.addHandler(made)
    log.setLevel(logging.INFO)
    yield made
    log.removeHandler(made)


def test_they_run_once_with_what_a_capture_knows(
    capsys: pytest.CaptureFixture[str], listener: Listener
) -> None:
    with pytest.warns(FutureWarning, match="slow path") as heard:
        found = piper.compile(job(), SPLIT)
        piper.execute(found, steps=1, launcher="inline")
    size = f"[rows, {LENGTH}, {WIDTH}]"
    assert (
        capsys.readouterr().out
        == f"a batch of {size} with 2*rows and tensor of shape {size}, float64\n"
    )
    assert [(w.filename, w.lineno) for w in heard] == [
        (__file__, Net.forward.__code__.co_firstlineno + 4)
    ]
    assert listener.heard == ["after Linear: mean tensor of shape [], float64"]
    said = next(
        line
        for line in explain(found).splitlines()
        if line.startswith("note: print, logging and warnings")
    )
    line = Net.forward.__code__.co_firstlineno + 3
    assert (
        f"ran once, when the model was captured, and do not run in training: {__file__}:{line} (print("
        in said
    )


def test_equal_to_one_device_and_nothing_is_said_where_nothing_ran(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = job(quiet=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = verify_strategy(made, SPLIT, steps=1)
    assert report.equal, report.text()
    assert not capsys.readouterr().out


def test_without_this_the_model_would_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(_torch_said, "FUNCTIONS", frozenset())
    monkeypatch.setattr("piper.api.captures.capturing.capture_key", lambda job, **_: None)
    with pytest.raises(CaptureError, match="print"):
        piper.compile(job(), SPLIT)
