"""Work of one process waits in its middle for others, one at a time."""

from __future__ import annotations

import threading

import pytest
import torch

from piper_runtime.engine.fibers import Fiber


def test_work_goes_on_with_the_answer() -> None:
    seen: list[float] = []

    def work() -> None:
        for _ in range(2):
            seen.append(float(fiber.exchange("all_reduce", "tp", torch.ones(()))))

    fiber = Fiber(work)
    fiber.start()
    for answer in (3.0, 5.0):
        assert not fiber.done and fiber.request is not None and fiber.request.axis == "tp"
        fiber.answer(torch.tensor(answer))
        assert seen != [answer]  # not before it goes on
        fiber.go_on()
    assert fiber.done and seen == [3.0, 5.0]


def test_random_numbers_are_as_if_it_had_run_through() -> None:
    drawn: list[torch.Tensor] = []

    def work() -> None:
        torch.manual_seed(1)
        drawn.append(torch.rand(2))
        fiber.exchange("all_reduce", "tp", torch.ones(()))
        drawn.append(torch.rand(2))

    fiber = Fiber(work)
    fiber.start()
    torch.manual_seed(7)  # another rank draws meanwhile
    fiber.answer(torch.ones(()))
    fiber.go_on()
    torch.manual_seed(1)
    assert torch.equal(torch.cat(drawn), torch.cat([torch.rand(2), torch.rand(2)]))


def test_what_it_raises_reaches_who_waits() -> None:
    def work() -> None:
        fiber.exchange("all_reduce", "tp", torch.ones(()))
        raise ValueError("in its second half")

    fiber = Fiber(work)
    fiber.start()
    fiber.answer(torch.ones(()))
    with pytest.raises(ValueError, match="second half"):
        fiber.go_on()


def test_work_that_nobody_answers_is_ended() -> None:
    before = threading.active_count()
    fiber = Fiber(lambda: fiber.exchange("all_reduce", "tp", torch.ones(())))
    fiber.start()
    fiber.cancel()
    assert threading.active_count() == before and not fiber.done
