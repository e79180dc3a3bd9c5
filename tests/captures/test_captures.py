"""A captured model is used again for the same content only: what the callables are made of, not where they live in
memory."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.api.captures import capturing
from piper_ir.ground.errors import JobError
from tests.helpers.capture_jobs import ONE, WIDTH, Net, depth_of, job

DEPTH = 2
SETTINGS = types.ModuleType("settings_of_test_captures")
SETTINGS.depth = 2  # type: ignore[attr-defined]  # a module of the user's


@dataclass
class Config:
    depth: int = 2


class Deep(Net):
    """Its depth is a global that only its constructor reads."""

    def __init__(self) -> None:
        super().__init__(DEPTH)


class Maker:
    def __init__(self, depth: int) -> None:
        self.depth = depth

    def __call__(self) -> nn.Module:
        return Net(self.depth)

    def method(self) -> nn.Module:
        return Net(self.depth)


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> Mock:
    found = Mock(wraps=capturing._capture)
    monkeypatch.setattr(capturing, "_capture", found)
    monkeypatch.setattr(capturing, "_CAPTURES", {})
    return found


def by_closure() -> tuple[Callable[[], Any], Callable[[int], None]]:
    config = Config()

    def model() -> nn.Module:
        return Net(config.depth)

    return model, lambda depth: setattr(config, "depth", depth)


def by_rebound_cell() -> tuple[Callable[[], Any], Callable[[int], None]]:
    depth = 2

    def model() -> nn.Module:
        return Net(depth)

    def change(other: int) -> None:
        nonlocal depth
        depth = other

    return model, change


def by_global() -> tuple[Callable[[], Any], Callable[[int], None]]:
    return lambda: Net(DEPTH), lambda depth: globals().update(DEPTH=depth)


def by_global_in_a_class() -> tuple[Callable[[], Any], Callable[[int], None]]:
    return Deep, lambda depth: globals().update(DEPTH=depth)


def by_attribute_of_a_module() -> tuple[Callable[[], Any], Callable[[int], None]]:
    return lambda: Net(SETTINGS.depth), lambda depth: setattr(SETTINGS, "depth", depth)


def by_default() -> tuple[Callable[[], Any], Callable[[int], None]]:
    def model(depth: int = 2) -> nn.Module:
        return Net(depth)

    return model, lambda depth: setattr(model, "__defaults__", (depth,))


def by_keyword_default() -> tuple[Callable[[], Any], Callable[[int], None]]:
    def model(*, depth: int = 2) -> nn.Module:
        return Net(depth)

    return model, lambda depth: setattr(model, "__kwdefaults__", {"depth": depth})


def by_instance() -> tuple[Callable[[], Any], Callable[[int], None]]:
    maker = Maker(2)
    return maker, lambda depth: setattr(maker, "depth", depth)


def by_bound_method() -> tuple[Callable[[], Any], Callable[[int], None]]:
    maker = Maker(2)
    return maker.method, lambda depth: setattr(maker, "depth", depth)


def by_partial() -> tuple[Callable[[], Any], Callable[[int], None]]:
    config = Config()
    return functools.partial(lambda c: Net(c.depth), config), lambda depth: setattr(
        config, "depth", depth
    )


def by_helper() -> tuple[Callable[[], Any], Callable[[int], None]]:
    sizes = {"layers": [2]}

    def helper() -> nn.Module:
        return Net(*sizes["layers"])

    return lambda: helper(), lambda depth: sizes.update(layers=[depth])


WAYS = [
    by_closure,
    by_rebound_cell,
    by_global,
    by_global_in_a_class,
    by_attribute_of_a_module,
    by_default,
    by_keyword_default,
    by_instance,
    by_bound_method,
    by_partial,
    by_helper,
]


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_callable_whose_content_changes_is_captured_again(
    way: Callable[[], tuple[Callable[[], Any], Callable[[int], None]]],
    monkeypatch: pytest.MonkeyPatch,
    counted: Mock,
) -> None:
    monkeypatch.setitem(globals(), "DEPTH", 2)
    monkeypatch.setattr(SETTINGS, "depth", 2)
    model, change = way()
    trained = job(model)
    assert [depth_of(trained), depth_of(trained)] == [2, 2]
    assert counted.call_count == 1
    change(3)
    assert depth_of(trained) == 3
    change(2)
    assert depth_of(trained) == 2
    assert counted.call_count == 2, "the first capture is still there"


@pytest.mark.long
def test_a_sweep_over_depth_trains_the_depth_that_it_asks_for() -> None:
    losses = {}
    for depth in (1, 2, 3):
        trained = job(lambda: Net(depth))  # noqa: B023 - on purpose: the lambda of each round reads the loop's variable
        run = piper.execute(piper.compile(trained, ONE), steps=1, launcher="inline")
        assert len(run.state_dict()) == 2 * depth
        losses[depth] = run.losses[0]
    assert len(set(losses.values())) == 3


@pytest.mark.long
def test_what_computes_otherwise_with_equal_shapes_is_captured_again() -> None:
    scale = 1.0
    trained = job(lambda: Net(2, scale))
    first = piper.execute(piper.compile(trained, ONE), steps=1, launcher="inline").losses
    scale = 0.5
    second = piper.execute(piper.compile(trained, ONE), steps=1, launcher="inline").losses
    assert first != second


@pytest.mark.long
def test_another_loss_or_class_of_the_same_name_is_captured_again(counted: Mock) -> None:
    power = 2

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).abs().pow(power).mean()

    trained = replace(job(Deep), loss=loss)
    first = piper.execute(piper.compile(trained, ONE), steps=1, launcher="inline").losses
    power = 3
    assert piper.execute(piper.compile(trained, ONE), steps=1, launcher="inline").losses != first
    assert counted.call_count == 2


def test_a_method_that_is_replaced_is_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = job(Deep)
    first = piper.execute(piper.compile(trained, ONE), steps=1, launcher="inline").losses
    monkeypatch.setattr(Net, "forward", lambda self, x: self.layers[0](x) + 0 * self.layers[1](x))
    assert piper.execute(piper.compile(trained, ONE), steps=1, launcher="inline").losses != first


def test_the_same_content_is_captured_once(counted: Mock) -> None:
    def made() -> piper.Job:
        config = Config()
        data = torch.ones(8, WIDTH)

        def rows_of(step: int, rows: range) -> tuple[Tensor, Tensor]:
            return data[rows.start : rows.stop], data[rows.start : rows.stop]

        return replace(
            job(lambda: Net(config.depth)), batch=rows_of, loss=lambda o, t: (o - t).square().mean()
        )

    for _ in range(3):
        piper.compile(made(), ONE)
    assert counted.call_count == 1
    assert len(capturing._CAPTURES) == 1


@pytest.mark.long
def test_other_data_of_the_same_shapes_is_the_same_capture_and_other_shapes_are_not(
    counted: Mock,
) -> None:
    width, calls = WIDTH, []

    def wide(step: int, rows: range) -> tuple[Tensor, Tensor]:
        calls.append(rows)
        return torch.ones(len(rows), 3, width), torch.zeros(len(rows), 3, width)

    first = piper.compile(replace(job(Deep), batch=wide), ONE)
    piper.compile(
        replace(job(Deep), batch=lambda step, rows: (wide(step, rows)[0] * 2, wide(step, rows)[0])),
        ONE,
    )
    assert counted.call_count == 1
    other = replace(job(Deep), batch=lambda step, rows: tuple(t[:, 0] for t in wide(step, rows)))
    assert piper.compile(other, ONE).plan.batch != first.plan.batch
    assert counted.call_count == 2


def test_a_model_that_is_not_the_compiled_one_any_more_is_refused_before_it_runs() -> None:
    made: list[Callable[[], nn.Module]] = [lambda: Net(2)]

    def model() -> nn.Module:
        return made[-1]()

    compiled = piper.compile(job(model), ONE)

    def frozen() -> nn.Module:
        net = Net(2)
        net.layers[1].requires_grad_(False)
        return net

    def wide() -> nn.Module:
        net = Net(2)
        net.layers[0] = nn.Linear(WIDTH, WIDTH + 1)
        return net

    def tied() -> nn.Module:
        net = Net(2)
        net.layers[1].weight = net.layers[0].weight
        return net

    def counting() -> nn.Module:
        net = Net(2)
        net.register_buffer("count", torch.zeros(()))
        return net

    cases = [
        (
            lambda: Net(3),
            r"has parameter .layers\.2\.(weight|bias)., which the compiled one has not",
        ),
        (lambda: Net(1), r"has no parameter 'layers\.1\.(weight|bias)'"),
        (frozen, r"layers\.1\.(weight|bias).*requires_grad=False.*requires_grad=True"),
        (wide, r"'layers\.0\.weight' of shape \[5, 4\].* \[4, 4\]"),
        (tied, r"layers\.1\.weight"),
        (counting, "buffer 'count'"),
    ]
    for other, says in cases:
        made.append(other)
        with pytest.raises(JobError, match=rf"Job\.model\(\) now .*{says}"):
            piper.execute(compiled, steps=1, launcher="inline")
    made.append(lambda: Net(2))
    assert piper.execute(compiled, steps=1, launcher="inline").losses


def test_a_parameter_that_is_trained_since_it_was_compiled_is_refused() -> None:
    train = False

    def model() -> nn.Module:
        net = Net(2)
        net.layers[1].requires_grad_(train)
        return net

    compiled = piper.compile(job(model), ONE)
    train = True
    with pytest.raises(JobError, match=r"requires_grad=True.*requires_grad=False.*compile"):
        piper.execute(compiled, steps=1, launcher="inline")
