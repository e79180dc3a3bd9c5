"""Ordinary things that constructors do are recorded exactly, and what would need numbers is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn

from piper.api.reference.reference_weights import constructed
from piper_ir.ground.errors import JobError
from piper_runtime.rank import materialize
from tests.helpers.cases import each_case
from tests.helpers.seeded_models import unusual_job

OUTER = nn.Linear(4, 4)


def holding(**tensors: Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        trained = tensor.is_floating_point() or tensor.is_complex()
        module.register_parameter(
            name, nn.Parameter(tensor)
        ) if trained else module.register_buffer(name, tensor)
    return module


def arrays() -> nn.Module:
    return holding(
        converted=torch.as_tensor(numpy.arange(3.0)).float(),
        doubled=torch.asarray(numpy.arange(4.0)) * 2,
        literal=torch.tensor(numpy.arange(5.0)),
        raw=torch.frombuffer(bytearray(16), dtype=torch.float32) + 1,
        exchanged=torch.from_dlpack(numpy.arange(3.0)),
        listed=torch.Tensor([1, 2, 3]),
        legacy=torch.FloatTensor(2, 3).uniform_(),
        flags=torch.BoolTensor([True, False]),
        numbers=torch.LongTensor(range(3)),
    )


def library_layers() -> nn.Module:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2)
    return nn.Sequential(
        nn.BatchNorm1d(4), nn.LSTM(4, 4), encoder, nn.Conv2d(3, 4, 3), nn.Bilinear(2, 3, 4)
    )


def weight_norm() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


def spectral_norm() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))


def copied_state() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.load_state_dict(OUTER.state_dict())
    return layer


def dropped() -> nn.Module:
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.copy_(nn.functional.dropout(layer.weight, 0.5))
        layer.bias.bernoulli_(0.5)
    layer.weight.data = layer.weight.data * 2
    return layer


def seeds_itself() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(4, 4)


def cast_and_tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model.double().to(torch.bfloat16)


def complex_parts() -> nn.Module:
    both = torch.view_as_complex(torch.randn(3, 2))
    return holding(
        real=both.real.clone(),
        imaginary=both.conj().imag,
        whole=torch.view_as_complex(torch.randn(3, 2)),
    )


def indexed() -> nn.Module:
    weight = torch.randn(5, 3)
    weight[torch.tensor([0, 2])] = 1.0
    weight[1:3, ::2] *= 2
    weight[weight > 0.5] = 0.25
    return holding(weight=weight)


def many_at_once() -> nn.Module:
    layer = nn.Linear(3, 3)
    torch._foreach_mul_([layer.weight.data, layer.bias.data], 3.0)
    return layer


def other_storages() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.weight.data = layer.weight.data.new_empty(3, 3).uniform_()
    layer.bias.data.set_(torch.randn(3))
    return layer


RECORDED = [
    arrays, library_layers, weight_norm, spectral_norm, copied_state, dropped, seeds_itself, cast_and_tied, complex_parts,
    indexed, many_at_once, other_storages,
]  # fmt: skip


@each_case("model", RECORDED)
def test_an_ordinary_constructor_is_recorded_exactly(model: Callable[[], nn.Module]) -> None:
    job = unusual_job(model)
    state, whole = materialize(job), constructed(job)
    made = {**state.params, **state.buffers}
    expected = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    assert made.keys() == expected.keys()
    assert [n for n, t in expected.items() if not torch.equal(made[n], t.to(made[n].dtype))] == []


def test_arrays_under_two_names_are_refused_as_without_a_recording() -> None:
    """Training would separate two parameters over the memory of one array; capture sees tensors, not arrays."""

    def twice() -> nn.Module:
        array = numpy.ones(4, dtype=numpy.float32)
        return holding(a=torch.from_numpy(array), b=torch.from_numpy(array))

    with pytest.raises(JobError, match=r"makes 'a' and 'b' of the same memory"):
        materialize(unusual_job(twice))


def orthogonal() -> nn.Module:
    return nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))


def nested() -> nn.Module:
    return holding(both=torch.tensor([torch.rand(()), torch.rand(())]))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            orthogonal,
            r"reads values of a tensor \(aten\.allclose\.default\) "
            r"\(.*test_seeded_ordinary\.py:\d+\)",
        ),
        (
            nested,
            r"raised RuntimeError: .*\(.*test_seeded_ordinary\.py:\d+\)\. The constructor runs "
            r"once without numbers",
        ),
    ],
)
def test_what_needs_numbers_is_refused(model: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises(JobError, match=says) as caught:
        materialize(unusual_job(model))
    assert "\n" not in str(caught.value)


@each_case("options", [{}, {"mmap": True}, {"assign": True}])
def test_weights_that_the_constructor_loads_are_refused_and_not_lost(
    options: dict[str, bool], tmp_path: Path
) -> None:
    torch.save(OUTER.state_dict(), tmp_path / "w.pt")

    def loads() -> nn.Module:
        layer = nn.Linear(4, 4)
        layer.load_state_dict(
            torch.load(tmp_path / "w.pt", mmap="mmap" in options), assign="assign" in options
        )
        return layer

    with pytest.raises(
        JobError, match=r"works on a storage \(torch\.load, .*Give the path of weights as init="
    ):
        materialize(unusual_job(loads))
