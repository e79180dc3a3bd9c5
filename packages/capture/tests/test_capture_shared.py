"""Tensors that share memory: one Parameter under two names is tied; two over the same bytes are refused if one
changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from piper_capture import capture
from piper_ir.ground.errors import CaptureError
from tests.helpers.cases import each_case

REFUSED: dict[str, tuple[Callable[[Net], None], str]] = {}
ACCEPTED: dict[str, Callable[[Net], None]] = {}


class Net(nn.Module):
    """Reads both halves `a` and `b`, a buffer `seen` and an own buffer `mask`; `change` is done last in the
    constructor."""

    def __init__(self, change: Callable[[Net], None], counts: bool) -> None:
        super().__init__()
        self.a, self.b, self.counts = nn.Linear(4, 4), nn.Linear(4, 4), counts
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("mask", torch.ones(4))
        change(self)

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.seen.add_(1)
        return self.b(torch.tanh(self.a(x))) * self.mask + self.seen


def refused(says: str) -> Callable[[Callable[[Net], None]], Callable[[Net], None]]:
    def add(change: Callable[[Net], None]) -> Callable[[Net], None]:
        REFUSED[change.__name__] = change, says
        return change

    return add


def accepted(change: Callable[[Net], None]) -> Callable[[Net], None]:
    ACCEPTED[change.__name__] = change
    return change


@refused(
    r"'a\.weight' and 'b\.weight' share memory.*'a\.weight' is trained.*`b\.weight = a\.weight`"
)
def parameter_of_the_data_of_another(net: Net) -> None:
    net.b.weight = nn.Parameter(net.a.weight.data)


@refused(r"'a\.weight' and 'b\.weight' share memory")
def parameter_of_a_transposed_view(net: Net) -> None:
    net.b.weight = nn.Parameter(net.a.weight.data.t())


@refused(r"'a\.weight' and 'b\.weight' share memory.*'b\.weight' is trained")
def frozen_parameter_of_a_trained_one(net: Net) -> None:
    net.a.weight = nn.Parameter(net.b.weight.data, requires_grad=False)


@refused(r"'a\.weight' and 'a\.kept' share memory")
def buffer_that_views_a_parameter(net: Net) -> None:
    net.a.register_buffer("kept", net.a.weight.data[:2])


@refused(r"'a\.weight' and 'a\.kept' share memory")
def attribute_that_views_a_parameter(net: Net) -> None:
    net.a.kept = net.a.weight.detach()


@refused(r"'mask' and 'seen' share memory.*'seen' is changed in forward")
def buffer_that_views_one_that_forward_changes(net: Net) -> None:
    net.counts = True
    net.mask, net.seen = net.seen[:1], net.seen
    net._buffers = {"mask": net.mask, "seen": net.seen}


@refused(r"'a\.weight' and 'b\.weight' share memory")
def overlapping_windows_of_one_tensor(net: Net) -> None:
    flat = torch.randn(28)
    net.a.weight, net.b.weight = (
        nn.Parameter(flat[:16].view(4, 4)),
        nn.Parameter(flat[12:].view(4, 4)),
    )


@refused(r"'a\.weight' and 'b\.weight' share memory")
def interleaved_columns_that_meet(net: Net) -> None:
    flat = torch.randn(4, 7)
    net.a.weight, net.b.weight = nn.Parameter(flat[:, :4]), nn.Parameter(flat[:, 3:])


@accepted
def one_parameter_under_two_names(net: Net) -> None:
    net.b.weight = net.a.weight


@accepted
def windows_of_one_tensor_that_do_not_overlap(net: Net) -> None:
    flat = torch.randn(32)
    net.a.weight, net.b.weight = (
        nn.Parameter(flat[:16].view(4, 4)),
        nn.Parameter(flat[16:].view(4, 4)),
    )


@accepted
def interleaved_columns(net: Net) -> None:
    flat = torch.randn(4, 8)
    net.a.weight, net.b.weight = nn.Parameter(flat[:, :4]), nn.Parameter(flat[:, 4:])


@accepted
def constant_buffers_over_the_same_bytes(net: Net) -> None:
    net.mask = net.seen[:]


@accepted
def frozen_parameters_over_the_same_bytes(net: Net) -> None:
    net.a.weight.requires_grad_(False)
    net.b.weight = nn.Parameter(net.a.weight.data, requires_grad=False)


def batch(rows: range) -> tuple[Tensor, Tensor]:
    return torch.ones(len(rows), 4), torch.ones(len(rows), 4)


def made(change: Callable[[Net], None], fake: bool) -> Callable[[], nn.Module] | nn.Module:
    return (lambda: Net(change, False)) if fake else Net(change, False)


@each_case("fake", [True, False], ids=["made-on-fake-tensors", "made-for-real"])
@each_case("name", REFUSED)
def test_refused_by_both_names(name: str, fake: bool) -> None:
    change, says = REFUSED[name]
    with pytest.raises(CaptureError, match=says):
        capture(made(change, fake), batch, nn.functional.mse_loss)


@each_case("name", ACCEPTED)
def test_accepted_where_nothing_is_lost(name: str) -> None:
    assert capture(made(ACCEPTED[name], True), batch, nn.functional.mse_loss).program.chunks
