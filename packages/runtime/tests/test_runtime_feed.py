"""The batch of a rank: what is taken later is what the user's function returned for that microbatch."""

from __future__ import annotations

import pytest
import torch

from packages.runtime.tests.chains import chain, run
from packages.runtime.tests.handmade import WIDTH
from piper_ir.ground.errors import JobError
from piper_runtime.rank.batches.feed import Feed

INPUTS, TARGETS = (
    torch.zeros(2, WIDTH, dtype=torch.float64),
    torch.zeros(2, WIDTH, dtype=torch.float64),
)


def refilled(step: int, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    """The same two tensors every time, with other content."""
    return INPUTS.fill_(rows.start), TARGETS.fill_(-1 - rows.start)


def test_a_refilled_tensor_does_not_change_what_is_taken_later() -> None:
    plan, _ = chain(pp=1, microbatches=3)
    feed = Feed(plan, 0, refilled)
    feed.begin(0)
    assert [float(feed.take("inputs", mb)[0, 0]) for mb in range(3)] == [0, 2, 4]
    assert [float(feed.take("targets", mb)[0, 0]) for mb in range(3)] == [-1, -3, -5]


def test_the_function_is_called_once_per_microbatch_and_only_what_comes_later_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    copies: list[torch.Tensor] = []

    def spy(step: int, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(rows.start)
        return refilled(step, rows)

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(Feed, "kept", staticmethod(kept))
    plan, _ = chain(pp=1, microbatches=2)
    feed = Feed(plan, 0, spy)
    for step in range(2):
        feed.begin(step)
        taken = [feed.take(name, mb) for mb in range(2) for name in ("inputs", "targets")]
        assert taken[0] is INPUTS and taken[1] is not TARGETS
    assert calls == [0, 2] * 2 and all(t is TARGETS for t in copies) and len(copies) == 4


def test_all_tensors_of_a_rank_are_checked_when_the_function_returns() -> None:
    plan, job = chain(pp=1, batch=lambda step, rows: (INPUTS, TARGETS[:1]))
    with pytest.raises(
        JobError, match=r"returned targets of shape \(1, 4\); the plan was made for \(2, 4\)"
    ):
        run(plan, job)
