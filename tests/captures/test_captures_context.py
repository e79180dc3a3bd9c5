"""Modes of torch around a compile: refused by name, counted among what a capture depends on, or without any effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import piper
from piper.api.captures import capturing
from piper_ir.ground.errors import CaptureError
from tests.helpers.capture_jobs import ONE, WIDTH, Net, job

Context = Callable[[], AbstractContextManager[Any]]
HALF = piper.Strategy(piper.Mesh(), (piper.split(piper.where(), microbatches=8),))
"""Microbatches of one row, whose program is traced by itself."""


@pytest.fixture(autouse=True)
def none_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "_CAPTURES", {})


class Ignored(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


class Watched(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


@contextmanager
def hooked(name: str) -> Iterator[None]:
    handle = getattr(modules, name)(lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def within_vmap() -> Iterator[None]:
    torch._C._functorch._vmap_increment_nesting(2, "error")
    try:
        yield
    finally:
        torch._C._functorch._vmap_decrement_nesting()


HOOKS = [
    "register_module_forward_hook",
    "register_module_forward_pre_hook",
    "register_module_full_backward_hook",
    "register_module_full_backward_pre_hook",
    "register_module_buffer_registration_hook",
    "register_module_module_registration_hook",
    "register_module_parameter_registration_hook",
]
REFUSED: list[tuple[Context, str]] = [
    (
        lambda: torch.autocast("cpu", torch.bfloat16),
        r"torch\.autocast\('cpu'\) is active.*Precision\(params='bfloat16'\)",
    ),
    (torch.inference_mode, "inference_mode is active"),
    (Ignored, "the mode Ignored is active"),
    (Watched, "the mode Watched is active"),
    (torch.autograd.graph.save_on_cpu, "saved_tensors_hooks"),
    (within_vmap, "a transform of torch.func"),
    (torch.autograd.forward_ad.dual_level, "forward-mode"),
    *(
        (partial(hooked, name), "a hook for all modules is registered.*in its constructor")
        for name in HOOKS
    ),
]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("context", "says"), REFUSED)
def test_a_mode_that_changes_traces_is_refused_by_name(context: Context, says: str) -> None:
    """It is refused where a capture is kept as well, and where it would be traced for other rows only."""
    trained = job(lambda: Net(2))
    with context(), pytest.raises(CaptureError, match=says):
        piper.compile(trained, ONE)
    assert not capturing._CAPTURES
    captured = capturing.captured_job(trained)
    with context(), pytest.raises(CaptureError, match=says):
        piper.compile(trained, ONE)
    with context(), pytest.raises(CaptureError, match=says):
        captured.bind(1)
    assert piper.compile(trained, HALF).plan.rows == 1


def test_verify_tune_and_a_run_refuse_autocast() -> None:
    from piper.api.reference.verification import verify_strategy

    trained = job(lambda: Net(2))
    compiled = piper.compile(trained, ONE)
    calls: list[Callable[[], Any]] = [
        lambda: verify_strategy(trained, ONE),
        lambda: piper.tune(trained, lambda trial: ONE, cluster="h100x1", trials=1, workers=0),
        lambda: piper.execute(compiled, steps=1, launcher="inline"),
    ]
    for call in calls:
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(CaptureError, match=r"torch\.autocast\('cpu'\) is active"),
        ):
            call()


@contextmanager
def matmul_precision(value: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x.view(-1, 1, 1, WIDTH)).chunk(3, dim=-1)
        attended: Tensor = nn.functional.scaled_dot_product_attention(q, k, v)
        return attended.reshape(-1, WIDTH)


SAME: list[Context] = [
    torch.no_grad,
    torch.autograd.detect_anomaly,
    lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    lambda: matmul_precision("high"),
    lambda: torch.backends.cudnn.flags(enabled=False),
    lambda: threads(2),
    lambda: torch.autocast("cpu", enabled=False),
    lambda: torch.autograd.set_multithreading_enabled(False),
]


def texts(trained: piper.Job) -> tuple[Any, ...]:
    captured = capturing._capture(trained).assembled
    sources = [
        step.source
        for code in captured.code
        for rows in (1, 4)
        for step in captured.code.get(code, rows).values()
    ]
    return captured.program, captured.bind(1), sources


@pytest.mark.long
@pytest.mark.parametrize("context", SAME)
def test_a_mode_that_is_not_counted_changes_no_capture(
    context: Context, recwarn: pytest.WarningsRecorder
) -> None:
    trained = job(Attention)
    with context():
        inside = texts(trained)
    assert inside == texts(trained)


COUNTED: list[tuple[Callable[[Any], None], Any, Any]] = [
    (torch.set_default_dtype, torch.float64, torch.float32),
    (torch.set_default_device, "meta", None),
    (torch.use_deterministic_algorithms, True, False),
]


@pytest.mark.parametrize(("set_to", "other", "usual"), COUNTED)
def test_a_setting_that_is_counted_gives_another_key(
    set_to: Callable[[Any], None], other: Any, usual: Any
) -> None:
    trained = job(lambda: Net(2))
    before = capturing.capture_key(trained)
    try:
        set_to(other)
        assert capturing.capture_key(trained) != before
    finally:
        set_to(usual)
    assert capturing.capture_key(trained) == before


@pytest.mark.long
def test_a_capture_that_does_not_hold_at_some_rows_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = job(lambda: Net(2))
    piper.compile(trained, ONE)
    (kept,) = capturing._CAPTURES.values()

    def refused(captured: object, rows: int, kernels: str) -> None:
        raise CaptureError("other rows")

    with monkeypatch.context() as patch, pytest.raises(CaptureError, match="other rows"):
        patch.setattr(type(kept.assembled), "bind", refused)
        piper.compile(trained, HALF)
    assert not capturing._CAPTURES
    assert piper.compile(trained, HALF).plan.rows == 1
