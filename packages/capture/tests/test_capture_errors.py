"""What capture refuses, by name and with the user's line."""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper_capture import capture, region
from piper_ir.ground.errors import CaptureError, SelectorError
from tests.helpers.cases import each_case

REFUSED: dict[str, tuple[Callable[[nn.Linear, Tensor], Tensor], str]] = {}


def refused(pattern: str) -> Callable[[Any], Any]:
    def add(body: Any) -> Any:
        REFUSED[body.__name__] = (body, pattern)
        return body

    return add


@refused(r"cannot be captured")
def value_read(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x) if x.sum().item() > 0 else x


@refused(r"(?s)Python or numpy draws a random number.*torch.where")
def drawn_by_python(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x) if random.random() < 0.5 else x


@refused(r"Python or numpy draws a random number.*torch.rand\(\(\)\)")
def drawn_by_python_as_a_factor(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x) * random.uniform(0.5, 1.0)


@refused(r"(?s)Python or numpy draws a random number.*torch.rand\(\(\)\)")
def drawn_by_numpy(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x) * numpy.random.rand()


@refused(r"the number of rows of the batch is compared or combined with a constant")
def rows_fixed(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x) + torch.ones(6, 1)


@refused(
    r"compared or combined with a constant.*torch\.kron with torch\.einsum.*take_along_dim with gather"
)
def rows_inside(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x) * torch.kron(x[:, :2], torch.ones(1, 2))


@refused(r"shape depends on values of tensors.*A loss leaves rows or tokens out by ignore_index")
def tokens_left_out(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x)[x[:, 0] != -100].cumsum(0)


@refused(r"(?s)a sparse tensor is made.*index_add")
def sparse(linear: nn.Linear, x: Tensor) -> Tensor:
    every = torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1), (4, 4))
    return torch.sparse.mm(every, linear(x).T).T


@refused(r"behaves differently with 2 rows")
def rows_branch(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x) if x.shape[0] > 3 else x


@refused(r"not affine in the rows")
def rows_squared(linear: nn.Linear, x: Tensor) -> Tensor:
    y = linear(x).flatten()
    return (y[:, None] * y[None, :]).sum() * linear(x)


@refused(r"depends on values of tensors")
def dynamic_shape(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x)[x > 0].cumsum(0)


@refused(r"a transform of torch.func .*batched operations")
def mapped(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(torch.func.vmap(torch.tanh)(x))


@refused(r"a transform of torch.func .*batched operations")
def gradient_inside(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(torch.func.vmap(torch.func.grad(lambda row: (row**3).sum()))(x))


@refused(r"a transform of torch.func .*batched operations")
def tangent_inside(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1])


@refused(r"batch_norm.*batch statistics")
def batch_statistics(linear: nn.Linear, x: Tensor) -> Tensor:
    return F.batch_norm(linear(x), None, None, training=True)


@refused(r"torch.autocast\('cuda'\) inside the model")
def autocast(linear: nn.Linear, x: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return linear(x)


@refused(r"parameter 'linear.bias' is changed in place")
def parameter_change(linear: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        linear.bias.mul_(0.5)
    return linear(x)


@refused(r"that other regions see through a view")
def aliased_change(linear: nn.Linear, x: Tensor) -> Tensor:
    with region(stage=0):
        y = linear(x)
        view = y.view(-1, 2, 2)
    with region(stage=1):
        y.add_(1)
        return linear(view.reshape(-1, 4)) + y


@torch.library.custom_op("piper_tests::no_shape", mutates_args=())
def no_shape(x: Tensor) -> Tensor:
    return x * 2


@refused(r"register_fake")
def unregistered_shape(linear: nn.Linear, x: Tensor) -> Tensor:
    return no_shape(linear(x))


@refused(r"torch.library.custom_op\('ns::name'")
def unregistered_kernel(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(torch.tensor(numpy.frompyfunc(abs, 1, 1)(x.numpy())))


@refused(r"coordinate recompute=True is not a non-negative integer; .* and the option opaque=True")
def option_of_region(linear: nn.Linear, x: Tensor) -> Tensor:
    with region(recompute=True):
        return linear(x)


@refused(r"opaque=2; write opaque=True")
def odd_opaque(linear: nn.Linear, x: Tensor) -> Tensor:
    with region(opaque=2):  # type: ignore[arg-type]  # on purpose
        return linear(x)


@refused(r"batch statistics make every row depend on the whole microbatch")
def statistics_in_an_opaque_region(linear: nn.Linear, x: Tensor) -> Tensor:
    with region(opaque=True):
        return F.batch_norm(linear(x).flatten(1), None, None, training=True).view_as(x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]  # one gradient
        return 2 * grad


@refused(r"torch.autograd.Function.* is not accepted in an opaque region")
def function_in_an_opaque_region(linear: nn.Linear, x: Tensor) -> Tensor:
    with region(opaque=True):
        return Doubled.apply(linear(x))


@refused(
    r"sees it raise AttributeError\(.*absent.*\n.*run on such a batch without Piper.*otherwise "
    r"than Python"
)
def raises(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear.absent(x)


@refused(r"coordinate stage='a' is not a non-negative integer")
def odd_coordinate(linear: nn.Linear, x: Tensor) -> Tensor:
    with region(stage="a"):  # type: ignore[arg-type]  # on purpose
        return linear(x)


GLOBAL = torch.ones(4)


@refused(r"neither a parameter, a buffer nor part of the batch")
def global_tensor(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x) * GLOBAL


class Model(nn.Module):
    def __init__(self, body: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(4, 4), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.linear, x)


def batch(rows: range) -> tuple[Tensor, Tensor]:
    return torch.ones(len(rows), 4), torch.ones(len(rows), 4)


def mean(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


@pytest.mark.long
@each_case("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    body, pattern = REFUSED[name]
    with pytest.raises(CaptureError, match=pattern) as caught:
        capture(lambda: Model(body), batch, mean)
    if name == "rows_squared":
        return
    first = inspect.getsourcelines(body)[1]
    named = [
        n for n in range(first, first + 9) if f"test_capture_errors.py:{n}" in str(caught.value)
    ]
    assert named, str(caught.value)


class Holding(nn.Module):
    """Hold something that is neither a tensor nor a module, deep within the model."""

    def __init__(self, held: object) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))
        self.inner[0].held = held

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_an_attribute_that_cannot_be_copied_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"cannot be copied.*: inner\.0\.held: .*lock"):
        capture(lambda: Holding(threading.Lock()), batch, mean)


def test_a_model_may_hold_a_custom_operator() -> None:
    assert capture(lambda: Holding(no_shape), batch, mean).program.chunks


def test_the_same_model_without_the_offence_is_captured() -> None:
    assert capture(lambda: Model(lambda linear, x: linear(x)), batch, mean).program.chunks


@each_case(
    ("loss", "pattern"),
    [
        (
            lambda o, t: o,
            r"torch.float32 of shape \[rows, 4\]; it must return a floating-point scalar",
        ),
        (lambda o, t: (o.sum(), t), r"weight of shape"),
        (lambda o, t: t.sum(), "does not depend on any parameter"),
        (lambda o, t: o.sum().long(), "torch.int64"),
    ],
)
def test_losses_of_the_wrong_kind(loss: Any, pattern: str) -> None:
    with pytest.raises(CaptureError, match=pattern):
        capture(lambda: Model(lambda linear, x: linear(x)), batch, loss)


@each_case(
    ("make", "pattern"),
    [
        (lambda rows: torch.ones(4), "must return a pair"),
        (lambda rows: (torch.ones(3, 4), torch.ones(2)), r"inputs has shape \(3, 4\) for 2 rows"),
        (lambda rows: (torch.ones(2, 4), {"n": b"3"}), "targets.n is a bytes"),
        (
            lambda rows: ([torch.ones(2, 4)], torch.ones(2)),
            r"type list; inputs: a Tensor, tuple \(positional\), dict",
        ),
        (
            lambda rows: {}["x"],
            r"batch\(rows=range\(0, 2\)\) raised KeyError: 'x' \(.*test_capture_errors.py:\d+\)",
        ),
    ],
)
def test_batches_of_the_wrong_kind(make: Any, pattern: str) -> None:
    with pytest.raises(CaptureError, match=pattern):
        capture(lambda: Model(lambda linear, x: linear(x)), make, mean)


def test_a_model_function_that_returns_something_else() -> None:
    with pytest.raises(CaptureError, match="model\\(\\) returned int"):
        capture(lambda: 3, batch, mean)  # type: ignore[arg-type, return-value]  # on purpose


def test_rows_of_a_microbatch_are_checked_when_they_are_bound() -> None:
    captured = capture(
        lambda: Model(lambda linear, x: linear(x) if x.shape[0] < 9 else x), batch, mean
    )
    captured.bind(8)
    with pytest.raises(CaptureError, match="behaves differently with 9 rows"):
        captured.bind(9)


def test_a_batch_of_one_row_is_asked_for_one_row() -> None:
    data = torch.ones(1, 4)

    def sliced(rows: range) -> tuple[Tensor, Tensor]:
        return data[rows.start : rows.stop], data[rows.start : rows.stop]

    assert capture(lambda: Model(lambda linear, x: linear(x)), sliced, mean, most=1).program.chunks
    with pytest.raises(CaptureError, match=r"shape \(1, 4\) for 2 rows"):
        capture(lambda: Model(lambda linear, x: linear(x)), sliced, mean)


@each_case("kind", [ValueError, KeyError, ImportError])
def test_a_constructor_that_raises_is_named_with_its_line(kind: type[Exception]) -> None:
    def construct() -> nn.Module:
        raise kind("no such size")

    line = inspect.getsourcelines(construct)[1] + 1
    with pytest.raises(
        CaptureError,
        match=rf"model\(\) raised {kind.__name__}: .*no such size.*test_capture_errors.py:{line}\)",
    ):
        capture(construct, batch, mean)


def test_errors_of_ours_in_user_code_pass_unchanged() -> None:
    def refuse() -> nn.Module:
        raise SelectorError("as it is")

    with pytest.raises(SelectorError, match=r"^as it is$"):
        capture(refuse, batch, mean)


class Hooked(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        most = 1.0 if what == "max_norm" else None
        self.embed = nn.Embedding(4, 4, sparse=what == "sparse", max_norm=most)
        self.weight = nn.Parameter(
            torch.ones(4, dtype=torch.complex64 if what == "complex" else torch.float32)
        )
        if what == "hook":
            self.weight.register_hook(lambda g: g * 0.5)
        if what == "accumulate":
            self.weight.register_post_accumulate_grad_hook(lambda p: None)
        if what == "backward":
            self.embed.register_full_backward_hook(lambda module, gin, gout: None)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x[:, 0].long()) * self.weight


@each_case(
    ("what", "says"),
    [
        ("hook", "'weight' has a hook"),
        ("accumulate", "'weight' has a hook"),
        ("backward", "'embed' has a hook on its backward"),
        ("complex", "torch.complex64"),
        ("sparse", "sparse=False"),
        ("max_norm", "'embed' is an embedding that rescales its weight in forward"),
    ],
)
def test_what_would_be_left_out_silently_is_refused(what: str, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        capture(lambda: Hooked(what), batch, mean)


class Counter(nn.Module):
    def __init__(self, read: bool) -> None:
        super().__init__()
        self.weight, self.steps, self.read = nn.Parameter(torch.ones(4)), 0, read

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x * self.weight * (1 + self.steps if self.read else 1)


def test_a_counter_that_forward_reads_is_refused_and_one_that_it_does_not_is_not() -> None:
    with pytest.raises(CaptureError, match=r"forward changes steps and.*register_buffer"):
        capture(lambda: Counter(True), batch, mean)
    assert capture(lambda: Counter(False), batch, mean).program.chunks
