"""Means over tokens that devices share are those of one device, where parts have different numbers of targets that
count."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch import Tensor

import piper
from piper import Mesh
from piper.models import LlamaConfig
from piper_compiler import Strategy
from piper_ir.ground.select import where
from piper_runtime.rank.job.job import Job
from tests.helpers import parity, shared_jobs
from tests.helpers.memory_judge import lies

IGNORED, LENGTH, VOCAB = -100, 8, 64
CONFIG = LlamaConfig(layers=1, width=32, heads=8, kv_heads=4, hidden=48, vocab=VOCAB, length=LENGTH)


@cache
def job() -> Job:
    """The first tokens have no target, and the second half of every second row has none."""
    whole = piper.models.job(CONFIG, global_batch=2, precision="float64")

    def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
        tokens, targets = whole.batch(step, rows)
        masked = targets.clone()
        masked[:, :3] = masked[::2, LENGTH // 2 :] = IGNORED
        return tokens, masked

    return replace(whole, batch=batch, optimizer=shared_jobs.adamw, clip_norm=0.5)


def compiled(given: Job, cp: int, tp: int, stream: str = "") -> Any:
    sharers = [piper.shard(where(), over="tp", stream=stream)] if tp > 1 else []
    tokens = [piper.shard(where(), over="cp", index="tokens")] if cp > 1 else []
    axes = {name: n for name, n in (("cp", cp), ("tp", tp)) if n > 1}
    return piper.compile(given, Strategy(Mesh(**axes), [*sharers, *tokens]))


def wrong(given: Job, made: Any, found: Any) -> Any:
    expected = parity.reference(given, replicas=1, microbatches=1)
    return parity.differences(parity.RunOutcome.of(found), expected)


LONG = pytest.mark.long
CASES = [
    (2, 1, ""), (4, 2, "tokens"),
    *(pytest.param(*each, marks=LONG) for each in ((4, 1, ""), (2, 2, ""), (2, 2, "tokens"), (4, 2, ""))),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("cp", "tp", "stream"), CASES)
def test_a_loss_of_masked_labels(cp: int, tp: int, stream: str) -> None:
    made = compiled(job(), cp, tp, stream)
    found = shared_jobs.run(made)
    assert not wrong(job(), made, found)
    assert not lies(made.plan, found.memory)
    head = made.plan.chunks[-1]
    logits = made.plan.rows * LENGTH * VOCAB * 8 // cp // tp
    assert (
        max(spec.nbytes for name, spec in head.ports.items() if name.startswith("saved")) == logits
    ), "no others are kept"
    sent = [c for sig in head.steps.values() for c in sig.collectives if c.axis == "cp"]
    assert [(c.kind, c.nbytes) for c in sent] == [("all_reduce", 8)], (
        "the loss, and nothing of its gradient"
    )


def test_a_mean_over_local_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean of the means of the parts is another number where the parts have different numbers of targets."""
    made = compiled(job(), 2, 1)
    exported = type(made.code).export

    def local(code: Any) -> Any:
        own = rf"ne = 2 * (\1.view(-1, 2, {LENGTH // 2})[:, PLACE['cp']] != {IGNORED})"
        return replace(
            code, source=re.sub(r"ne = _aten_ne_Scalar\((\w+), -100\)", own, code.source)
        )

    def changed(store: Any, codes: Any, rows: int) -> Any:
        return {
            k: {step: local(code) for step, code in v.items()}
            for k, v in exported(store, codes, rows).items()
        }

    monkeypatch.setattr(type(made.code), "export", changed)
    assert wrong(job(), made, shared_jobs.run(made))
