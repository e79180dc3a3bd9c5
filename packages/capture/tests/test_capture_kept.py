"""What forward keeps from one call to the next: refused by name where the next call computes something else with it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piper_capture import capture
from piper_capture.trace import dynamo
from piper_ir.ground.errors import CaptureError
from tests.helpers.cases import each_case

Body = Callable[[Any, Tensor], Tensor]
REFUSED: dict[str, tuple[Body, str]] = {}
TAKEN: dict[str, Body] = {}
CACHE: dict[str, Tensor] = {}
CALLS = 0
SCHEDULE = {5: 2}


def refused(name: str) -> Callable[[Body], Body]:
    def add(body: Body) -> Body:
        REFUSED[body.__name__] = body, name
        return body

    return add


def taken(body: Body) -> Body:
    TAKEN[body.__name__] = body
    return body


class State:
    last: Tensor | None = None
    rate = 0.0


class Layer(nn.Module):
    """A layer whose forward is `body(self, x)`, with places to keep things in."""

    made = 0

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(4, 4), body
        self.cache: Tensor | None = None
        self.history: list[Tensor] = []
        self.table: dict[str, Tensor] = {}
        self.state, self.calls, self.scale, self.warm = State(), 0, 1.0, False
        self.counts, self.stage, self.clock = [0], 0, count()
        self.register_buffer("constant", torch.arange(4.0))
        self.register_buffer("moving", torch.zeros(4))
        self.shown, self.aux_loss = torch.empty(0), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(body)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


@refused("layers.0.cache")
def mean_of_the_first_batch(layer: Any, x: Tensor) -> Tensor:
    y = layer.linear(x)
    if layer.cache is None:
        layer.cache = y.detach().mean(0)
    return y + layer.cache


@refused("layers.0.cache")
def mean_of_the_batch_before(layer: Any, x: Tensor) -> Tensor:
    y = layer.linear(x) if layer.cache is None else layer.linear(x) + layer.cache
    layer.cache = y.detach().mean(0)
    return y


@refused("layers.0.cache")
def function_of_a_parameter(layer: Any, x: Tensor) -> Tensor:
    if layer.cache is None:
        layer.cache = layer.linear.weight.detach().sum(0)
    return layer.linear(x) + layer.cache


@refused("layers.0.cache")
def noise_drawn_once(layer: Any, x: Tensor) -> Tensor:
    if layer.cache is None:
        layer.cache = torch.randn(4)
    return layer.linear(x) + layer.cache


@refused("layers.0.cache")
def the_batch_itself(layer: Any, x: Tensor) -> Tensor:
    before, layer.cache = layer.cache, x
    return layer.linear(x) if before is None else layer.linear(x) + before.mean(0)


@refused(r"layers.0.history\[0\]")
def a_list(layer: Any, x: Tensor) -> Tensor:
    layer.history.append(layer.linear(x).detach().mean(0))
    return layer.linear(x) + sum(layer.history)


@refused(r"layers.0.table\['mean'\]")
def a_dict(layer: Any, x: Tensor) -> Tensor:
    y = layer.linear(x) + layer.table.get("mean", 0.0)
    layer.table["mean"] = y.detach().mean(0)
    return y


@refused("layers.0.state.last")
def an_object(layer: Any, x: Tensor) -> Tensor:
    y = layer.linear(x) if layer.state.last is None else layer.linear(x) + layer.state.last
    layer.state.last = y.detach().mean(0)
    return y


@refused("CACHE")
def a_global_dict(layer: Any, x: Tensor) -> Tensor:
    y = layer.linear(x) + CACHE.get("mean", 0.0)
    CACHE["mean"] = y.detach().mean(0)
    return y


@refused("CALLS")
def a_global_number(layer: Any, x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return layer.linear(x) * CALLS


@refused("layers.0.calls")
def a_counter(layer: Any, x: Tensor) -> Tensor:
    layer.calls += 1
    return layer.linear(x) / layer.calls


@refused("layers.0.calls")
def every_tenth_call(layer: Any, x: Tensor) -> Tensor:
    layer.calls += 1
    return layer.linear(x) * (2 if layer.calls % 10 == 0 else 1)


@refused("layers.0.calls")
def a_warm_up(layer: Any, x: Tensor) -> Tensor:
    layer.calls += 1
    return layer.linear(x) * (2 if layer.calls > 1000 else 1)


@refused("layers.0.scale")
def annealing(layer: Any, x: Tensor) -> Tensor:
    layer.scale *= 0.9
    return layer.linear(x) * layer.scale


@refused("layers.0.warm")
def a_flag(layer: Any, x: Tensor) -> Tensor:
    y = layer.linear(x) if layer.warm else layer.linear(x) * 0.5
    layer.warm = True
    return y


@refused("layers.0.counts")
def a_number_in_a_list(layer: Any, x: Tensor) -> Tensor:
    layer.counts[0] += 1
    return layer.linear(x) * layer.counts[0]


@refused("layers.0.fresh")
def a_buffer_of_the_first_batch(layer: Any, x: Tensor) -> Tensor:
    if not layer.warm:
        layer.register_buffer("fresh", x.mean(0))
        layer.warm = True
    return layer.linear(x) + layer.fresh


@refused("layers.0.cache")
def written_after_it_was_read(layer: Any, x: Tensor) -> Tensor:
    if layer.cache is None:
        layer.cache = torch.zeros(4)
        y = layer.linear(x) + layer.cache
        layer.cache.add_(1.0)
        return y
    return layer.linear(x) + layer.cache


@refused("layers.0.cache")
def a_function_of_a_buffer_that_moves(layer: Any, x: Tensor) -> Tensor:
    if layer.cache is None:
        layer.cache = layer.moving + 1
    layer.moving.add_(1.0)
    return layer.linear(x) + layer.cache


@refused("layers.0.calls")
def every_seventh_call(layer: Any, x: Tensor) -> Tensor:
    layer.calls += 1
    return layer.linear(x) * (2 if layer.calls % 7 == 3 else 1)


@refused("layers.0.counts")
def every_seventh_call_counted_in_a_list(layer: Any, x: Tensor) -> Tensor:
    layer.counts[0] += 1
    return layer.linear(x) * (2 if layer.counts[0] % 7 == 3 else 1)


@refused("layers.0.history")
def the_length_of_a_list(layer: Any, x: Tensor) -> Tensor:
    layer.history.append(x)
    return layer.linear(x) * (2 if len(layer.history) == 5 else 1)


@refused("layers.0.table")
def a_key_that_appears_later(layer: Any, x: Tensor) -> Tensor:
    layer.table[len(layer.table)] = x
    return layer.linear(x) * (2 if 5 in layer.table else 1)


@refused("layers.0.state.rate")
def a_very_slow_average(layer: Any, x: Tensor) -> Tensor:
    layer.state.rate = 0.5 * layer.state.rate + 1e-12
    return layer.linear(x) * (2 if layer.state.rate > 1 else 1)


@refused("layers.0.stage")
def a_stage_that_changes_after_some_calls(layer: Any, x: Tensor) -> Tensor:
    y = layer.linear(x) * (2 if layer.stage > 3 else 1)
    layer.calls += 1
    layer.stage = layer.calls // 100
    return y


@refused("CALLS")
def every_seventh_call_counted_globally(layer: Any, x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return layer.linear(x) * (2 if CALLS % 7 == 3 else 1)


@refused(r"type\(model.layers.0\).made")
def every_seventh_call_counted_on_a_class(layer: Any, x: Tensor) -> Tensor:
    type(layer).made += 1
    return layer.linear(x) * (2 if layer.made % 7 == 3 else 1)


@refused("layers.0.clock")
def an_iterator(layer: Any, x: Tensor) -> Tensor:
    return layer.linear(x) * (2 if next(layer.clock) == 3 else 1)


@refused("layers.0.calls")
def a_number_looked_up(layer: Any, x: Tensor) -> Tensor:
    layer.calls += 1
    return layer.linear(x) * SCHEDULE.get(layer.calls, 1)


@taken
def statistics_that_nothing_reads(layer: Any, x: Tensor) -> Tensor:
    layer.calls = layer.calls + 1
    layer.counts[0] += x.shape[0]
    layer.table["calls"] = layer.calls
    layer.state.rate = 0.9 * layer.state.rate + 0.1 * layer.calls
    layer.history.append(layer.calls)
    return layer.linear(x)


@taken
def a_list_that_is_emptied_first(layer: Any, x: Tensor) -> Tensor:
    layer.history.clear()
    y = layer.linear(x)
    layer.history.append(y.square().mean(-1, keepdim=True))
    return y + sum(layer.history)


@taken
def a_cached_constant(layer: Any, x: Tensor) -> Tensor:
    if layer.cache is None:
        layer.cache = torch.arange(x.shape[1]) / 2
    return layer.linear(x) + layer.cache


@taken
def a_cached_function_of_a_constant_buffer(layer: Any, x: Tensor) -> Tensor:
    if layer.cache is None:
        layer.cache = layer.constant.cos()
    return layer.linear(x) * layer.cache


@taken
def a_cached_table_that_is_filled_in_place(layer: Any, x: Tensor) -> Tensor:
    if not layer.warm:
        table = torch.zeros(4)
        table[0::2], table[1::2] = layer.constant[0::2].sin(), layer.constant[1::2].cos()
        layer.register_buffer("fresh", table, persistent=False)
        layer.warm = True
    return layer.linear(x) + layer.fresh


@taken
def a_loss_that_is_only_kept(layer: Any, x: Tensor) -> Tensor:
    y = layer.linear(x)
    layer.cache = y.mean()
    layer.history.append(y)
    layer.calls += 1
    return y


@taken
def an_activation_that_is_only_kept(layer: Any, x: Tensor) -> Tensor:
    layer.cache = layer.linear(x)
    return layer.cache


@taken
def attributes_that_forward_never_reads(layer: Any, x: Tensor) -> Tensor:
    layer.shown = layer.linear(x)
    layer.aux_loss = layer.shown.square().mean()
    return layer.shown


@taken
def a_buffer_that_is_replaced(layer: Any, x: Tensor) -> Tensor:
    layer.moving = layer.moving + 1
    layer.calls += 1
    return layer.linear(x) + layer.moving


@taken
def a_flag_that_is_put_back(layer: Any, x: Tensor) -> Tensor:
    layer.warm, before = True, layer.warm
    layer.table["now"] = x
    out = layer.linear(x) * (2 if layer.warm else 1)
    layer.warm = before
    del layer.table["now"]
    return out


@pytest.mark.parametrize(
    ("update", "says"),
    [
        (lambda layer, y: y, r"is replaced in forward by .* of shape \[rows, 4\]"),
        (
            lambda layer, y: layer.moving.double(),
            r"replaced in forward by torch.float64 of shape \[4\]",
        ),
    ],
)
def test_a_buffer_keeps_its_shape_and_dtype(
    update: Callable[[Any, Tensor], Tensor], says: str
) -> None:
    def body(layer: Any, x: Tensor) -> Tensor:
        y = layer.linear(x) + layer.moving.mean()
        layer.moving = update(layer, y.detach())
        return y

    with pytest.raises(CaptureError, match=rf"buffer 'layers.0.moving', .*{says}"):
        capture(lambda: Model(body), batch, squared)


def batch(rows: range) -> tuple[Tensor, Tensor]:
    return torch.ones(len(rows), 4), torch.ones(len(rows), 4)


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", REFUSED)
def test_what_the_next_call_reads_is_refused_by_name_and_line(name: str) -> None:
    body, attribute = REFUSED[name]
    with pytest.raises(
        CaptureError, match=rf"forward changes (\S+ )*(\w+\.)*{attribute} .*register_buffer"
    ) as caught:
        capture(lambda: Model(body), batch, squared)
    first = inspect.getsourcelines(body)[1]
    assert any(f"{__file__}:{n} " in str(caught.value) for n in range(first, first + 9)), str(
        caught.value
    )


@pytest.mark.long
@each_case("name", TAKEN)
def test_what_makes_no_difference_is_taken(name: str) -> None:
    assert capture(lambda: Model(TAKEN[name]), batch, squared).program.chunks


def test_an_attribute_that_forward_never_reads_is_no_buffer() -> None:
    """Replicas may differ in it. One that is read, or that a checkpoint has, is a buffer as before."""

    def reads(layer: Any, x: Tensor) -> Tensor:
        y = layer.linear(x) + layer.aux_loss
        layer.aux_loss = y.mean()
        layer.moving = y.mean(0)
        return y

    for body, expected in (
        (attributes_that_forward_never_reads, set()),
        (reads, {"layers.0.aux_loss", "layers.0.moving"}),
    ):
        chunks = capture(lambda: Model(body), batch, squared).program.chunks  # noqa: B023 - called at once
        assert {o.ref for c in chunks for o in c.outputs if o.kind == "buffer"} == expected


def test_what_a_call_leaves_as_it_found_it_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's models mark the module that was called first, and take the mark away: a second trace costs as much
    again."""

    def again(calls: Any) -> None:
        raise RuntimeError("a second call is traced")

    monkeypatch.setattr(dynamo._Calls, "trace_again", again)
    assert capture(lambda: Model(a_flag_that_is_put_back), batch, squared).program.chunks
    with pytest.raises(RuntimeError, match="a second call is traced"):
        capture(lambda: Model(statistics_that_nothing_reads), batch, squared)


def test_globals_are_left_as_they_were() -> None:
    for name in ("a_global_dict", "a_global_number", "every_seventh_call_counted_on_a_class"):
        with pytest.raises(CaptureError):
            capture(lambda: Model(REFUSED[name][0]), batch, squared)  # noqa: B023 - called at once
    assert (CALLS, CACHE, Layer.made) == (0, {}, 0)
