"""Settings of a process travel to workers, or are refused by name, and so are methods of torch that someone has
replaced."""

from __future__ import annotations

import builtins
import decimal
import locale
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from piper_ir.ground.errors import JobError
from piper_runtime.rank.sending.shipping import Parcel, pack


def opened(parcel: Parcel) -> Any:
    return pickle.loads(pickle.dumps(parcel)).open()


PATCHED: dict[str, tuple[type, str, Callable[[], object]]] = {
    "torch.Tensor.mean is the function": (torch.Tensor, "mean", lambda: torch.ones(2).mean()),
    "torch.optim.sgd.SGD.step is the function": (torch.optim.SGD, "step", lambda: torch.optim.SGD),
    "torch.optim.optimizer.Optimizer.zero_grad is": (
        torch.optim.Optimizer,
        "zero_grad",
        lambda: torch.optim.Adam,
    ),
}


@pytest.mark.parametrize("said", PATCHED)
def test_a_replaced_method_of_torch_is_refused(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, name, called = PATCHED[said]
    with monkeypatch.context() as patched:
        patched.setattr(kind, name, lambda *_: 0.0)
        parcel = pack(called)
    with pytest.raises(JobError, match=f"{said} .*in the launcher and .* in the worker"):
        opened(parcel)


def test_what_a_script_has_put_among_the_built_in_names_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(builtins, "sunshine", 3, raising=False)
        parcel = pack(lambda: sunshine)  # type: ignore[name-defined]  # noqa: F821 - it is among the built-in names
    with pytest.raises(
        JobError, match=r"builtins.sunshine is 3 in the launcher and not set in the worker"
    ):
        opened(parcel)


SETTINGS: dict[str, tuple[Callable[[Any], object], Callable[[], object], list[Any]]] = {
    "deterministic": (torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled, [True, False]),
    "products": (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision, ["high", "highest"]),
    "a flag": (
        lambda value: setattr(torch.backends.cudnn, "benchmark", value), lambda: torch.backends.cudnn.benchmark, [True, False]
    ),
    "numpy": (lambda do: numpy.seterr(divide=do), lambda: numpy.geterr()["divide"], ["raise", "warn"]),
    "decimals": (lambda n: setattr(decimal.getcontext(), "prec", n), lambda: decimal.getcontext().prec, [7, 28]),
    "locale": (lambda n: locale.setlocale(locale.LC_ALL, n), lambda: locale.setlocale(locale.LC_ALL), ["C.UTF-8", "C"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_a_process_travel(name: str) -> None:
    change, read, (value, other) = SETTINGS[name]
    before = read()
    try:
        change(value)
        parcel = pack(len)
        change(other)
        opened(parcel)
        assert read() == value
    finally:
        change(before)


def test_another_default_device_is_refused() -> None:
    with torch.device("meta"):
        parcel = pack(len)
    with pytest.raises(
        JobError, match="default device is meta in the launcher and cpu in the worker"
    ):
        opened(parcel)
