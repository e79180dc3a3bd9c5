"""The next compile sees what the content of a model function does not show, or hardly."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
from torch import Tensor, nn

import piper
from piper.api.captures import capturing
from tests.helpers.capture_jobs import ONE, Net, depth_of, job

DEPTH = 2


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> Mock:
    found = Mock(wraps=capturing._capture)
    monkeypatch.setattr(capturing, "_capture", found)
    monkeypatch.setattr(capturing, "_CAPTURES", {})
    return found


class Sizes(numpy.ndarray):  # type: ignore[type-arg]  # of anything
    """An array with a dictionary."""


class Private:
    __slots__ = ("__depth",)

    def __init__(self) -> None:
        self.__depth = 2

    def depth(self) -> int:
        return self.__depth

    def change(self, depth: int) -> None:
        self.__depth = depth


def by_a_name_in_a_text() -> tuple[Callable[[], Any], Callable[[int], None]]:
    return lambda: Net(globals()["DEPTH"]), lambda depth: globals().update(DEPTH=depth)


def by_a_private_slot() -> tuple[Callable[[], Any], Callable[[int], None]]:
    private = Private()
    return lambda: Net(private.depth()), private.change


def by_an_attribute_of_a_class() -> tuple[Callable[[], Any], Callable[[int], None]]:
    class Sized:
        __depth__ = 2

    return lambda: Net(Sized.__depth__), lambda depth: setattr(Sized, "__depth__", depth)


def by_an_array() -> tuple[Callable[[], Any], Callable[[int], None]]:
    sizes = numpy.array([2]).view(Sizes)
    return lambda: Net(int(sizes[0])), lambda depth: sizes.__setitem__(0, depth)


def by_large_data() -> tuple[Callable[[], Any], Callable[[int], None]]:
    sizes = numpy.full(1_000_000, 2)
    return lambda: Net(int(sizes[-1])), lambda depth: sizes.__setitem__(-1, depth)


def by_environment() -> tuple[Callable[[], Any], Callable[[int], None]]:
    return lambda: Net(int(os.environ["PIPER_TEST_DEPTH"])), lambda depth: os.environ.update(
        PIPER_TEST_DEPTH=str(depth)
    )


def by_a_file() -> tuple[Callable[[], Any], Callable[[int], None]]:
    file = Path(tempfile.mkdtemp()) / "depth"
    file.write_text("2")
    return lambda: Net(int(file.read_text())), lambda depth: int(not file.write_text(str(depth)))


def by_a_file_that_a_library_reads() -> tuple[Callable[[], Any], Callable[[int], None]]:
    file = Path(tempfile.mkdtemp()) / "depth.npy"
    numpy.save(file, 2)
    return lambda: Net(int(numpy.load(str(file)))), lambda depth: numpy.save(file, depth)


WAYS = [
    by_a_name_in_a_text,
    by_a_private_slot,
    by_an_attribute_of_a_class,
    by_an_array,
    by_large_data,
    by_environment,
    by_a_file,
    by_a_file_that_a_library_reads,
]


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_model_that_is_made_otherwise_is_captured_again(
    way: Callable[[], tuple[Callable[[], Any], Callable[[int], None]]],
    monkeypatch: pytest.MonkeyPatch,
    counted: Mock,
) -> None:
    monkeypatch.setitem(globals(), "DEPTH", 2)
    monkeypatch.setenv("PIPER_TEST_DEPTH", "2")
    model, change = way()
    trained = job(model)
    assert [depth_of(trained), depth_of(trained)] == [2, 2]
    assert counted.call_count == 1, "what the function makes is equal"
    change(3)
    assert depth_of(trained) == 3
    assert counted.call_count == 2


class Scaled(Net):
    """Its forward computes with what a subclass says, and not only with parameters."""

    def __init__(self, scale: Callable[[], float]) -> None:
        super().__init__(2)
        self.factor = scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor()


def of_the_environment() -> float:
    return float(os.environ["PIPER_TEST_SCALE"])


def of_a_module_by_its_name() -> float:
    return float(sys.modules[__name__].SCALE)


def of_a_file() -> Callable[[], Any]:
    return lambda: Net(2, float(Path(os.environ["PIPER_TEST_FILE"]).read_text()))


SCALE = 1.0


@pytest.mark.long
@pytest.mark.parametrize(
    "model",
    [lambda: Scaled(of_the_environment), lambda: Scaled(of_a_module_by_its_name), of_a_file()],
)
def test_activations_follow_what_only_forward_or_a_file_says(
    model: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    losses = []
    for scale in (1.0, 0.5):
        monkeypatch.setenv("PIPER_TEST_SCALE", str(scale))
        monkeypatch.setattr(sys.modules[__name__], "SCALE", scale)
        (tmp_path / "scale").write_text(str(scale))
        monkeypatch.setenv("PIPER_TEST_FILE", str(tmp_path / "scale"))
        losses.append(
            piper.execute(piper.compile(job(model), ONE), steps=1, launcher="inline").losses
        )
    assert losses[0] != losses[1]


def test_a_job_that_cannot_be_told_from_others_is_captured_for_every_compile(counted: Mock) -> None:
    trained = job(lambda: Scaled(of_a_module_by_its_name))
    assert piper.compile(trained, ONE).plan.key == piper.compile(trained, ONE).plan.key
    assert counted.call_count == 2
    assert not capturing._CAPTURES
