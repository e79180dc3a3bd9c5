"""Protect that a fusion computes what its operations compute, and that its form says what the compiled one allocates
and moves."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Barrier, Thread

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from piper_ops import (
    DECOMPOSITIONS,
    OP_KERNELS,
    compiled_fusion,
    cross_entropy,
    cross_entropy_dgrad,
    layer_norm,
    layer_norm_backward,
    layer_norm_dgrad,
    layer_norm_wgrad,
    lowered,
    rms_norm,
    rms_norm_dgrad,
    rms_norm_wgrad,
)
from piper_ops.inductor import _torch_inductor, fusions

SHAPE = [6]


def drawn(*shape: int) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64
    )


X, GRAD, W, B = drawn(2, 5, 6), drawn(5, 2, 6).view(2, 5, 6), drawn(6), drawn(6) + 1
RSTD = OP_KERNELS[rms_norm](X, SHAPE, W, 1e-6)[1]
_, MEAN, LN_RSTD = OP_KERNELS[layer_norm](X, SHAPE, W, B, 1e-5)
LOGITS, TARGET = drawn(7, 9), torch.tensor([0, 3, -100, 8, 8, 1, 2])
LSE = LOGITS.logsumexp(1)
ONE, EACH = torch.tensor(1.7, dtype=torch.float64), drawn(7)

CALLS = {
    "rms_norm": (rms_norm, (X, SHAPE, W, 1e-6)),
    "rms_norm without a weight": (rms_norm, (X, SHAPE, None, None)),
    "rms_norm_dgrad": (rms_norm_dgrad, (GRAD, X, SHAPE, RSTD, W)),
    "rms_norm_wgrad": (rms_norm_wgrad, (GRAD, X, SHAPE, RSTD, torch.float64)),
    "layer_norm": (layer_norm, (X, SHAPE, W, B, 1e-5)),
    "layer_norm of two dimensions": (layer_norm, (X, [5, 6], None, None, 1e-5)),
    "layer_norm_dgrad": (layer_norm_dgrad, (GRAD, X, SHAPE, MEAN, LN_RSTD, W)),
    "layer_norm_wgrad": (layer_norm_wgrad, (GRAD, X, SHAPE, MEAN, LN_RSTD, torch.float64, [True, False])),
    "layer_norm_backward": (layer_norm_backward, (GRAD, X, SHAPE, MEAN, LN_RSTD, W, [True, True])),
    "cross_entropy, mean": (cross_entropy, (LOGITS, TARGET, "mean", -100)),
    "cross_entropy, each": (cross_entropy, (LOGITS, TARGET, "none", -100)),
    "cross_entropy_dgrad, mean": (cross_entropy_dgrad, (ONE, LOGITS, TARGET, LSE, "mean", -100)),
    "cross_entropy_dgrad, each": (cross_entropy_dgrad, (EACH, LOGITS, TARGET, LSE, "none", -100)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_decomposition_is_its_kernel(name: str) -> None:
    op, args = CALLS[name]
    ours, theirs = (f[op](*args) for f in (DECOMPOSITIONS, OP_KERNELS))
    for a, b in zip(*((r,) if isinstance(r, Tensor) else r for r in (ours, theirs)), strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_every_decomposition_is_tried() -> None:
    assert {op for op, _ in CALLS.values()} == set(DECOMPOSITIONS)


GATED = """def fusion(args):
    a0, a1, = args
    args.clear()
    v0 = torch.ops.aten.silu.default(a0)
    v1 = torch.ops.aten.mul.Tensor(v0, a1)
    return (v1,)
"""


def test_one_kernel_moves_each_operand_once() -> None:
    """Eager operations move five tensors; the kernel that has both moves three and holds nothing between."""
    form = lowered(GATED, (((4, 8), "float32"), ((4, 8), "float32")), "cpu")
    assert (form.moved, form.workspace, form.owning) == ((3 * 4 * 8 * 4,), 0, True)


def test_a_result_that_is_no_storage_of_its_own_is_seen() -> None:
    source = "def fusion(args):\n    a0, = args\n    args.clear()\n"
    source += "    v0 = torch.ops.aten.add.Tensor(a0, 1)\n    return (v0, v0,)\n"
    assert not lowered(source, (((3,), "float32"),), "cpu").owning
    assert not lowered(source.replace("v0, v0", "a0, v0"), (((3,), "float32"),), "cpu").owning


def test_compiled_kernels_are_found_on_disk() -> None:
    """Code that this process or another one has compiled is read, and not made again."""
    specs, found = (((4, 8), "float64"), ((4, 8), "float64")), counters["inductor"]
    for _ in range(2):
        before = Counter(found)
        fusions._compiled.cache_clear()
        (made,) = compiled_fusion(GATED, specs, "cpu")([drawn(4, 8), drawn(4, 8)])
        torch.testing.assert_close(made, torch.nn.functional.silu(drawn(4, 8)) * drawn(4, 8))
    assert (Counter(found) - before)["fxgraph_cache_hit"] == 1
    assert not (Counter(found) - before)["fxgraph_cache_bypass"]


def test_a_kernel_left_unfinished_on_disk_is_compiled_again(tmp_path: Path) -> None:
    """Full disks and processes that end leave empty files, which the system's loader refuses in each later process.

    A process that ends while it compiles leaves no graph beside them.
    """
    program = f"""
import torch
from piper_ops import compiled_fusion
ones = [torch.ones(3, 7) for _ in range(2)]
print(*compiled_fusion({GATED!r}, (((3, 7), "float32"),) * 2, "cpu")(ones)[0].unique().tolist())
"""
    for ended in (False, True, True):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) == pytest.approx(1 / (1 + math.exp(-1)))
        (kernel,) = tmp_path.rglob("*.main.so")
        assert kernel.stat().st_size
        kernel.write_bytes(b"")
        if ended:
            shutil.rmtree(tmp_path / "fxgraph")


class Compiler:
    """Stand in for Inductor with its cache on disk; `compiled` counts the compilations."""

    def __init__(self, folder: Path) -> None:
        self._made, self.compiled = folder / "made", 0

    def __call__(self, function: Callable[..., object], specs: object, device: object) -> None:
        if not self._made.exists():
            self.compiled += 1
            time.sleep(0.2)
            self._made.touch()


def test_of_ranks_that_start_together_one_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, ranks, together = Compiler(tmp_path), 3, Barrier(3)
    monkeypatch.setattr(_torch_inductor, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(_torch_inductor, "compiled", compiler)

    def start() -> None:
        together.wait()
        fusions._compiled.__wrapped__(
            GATED, (), "cpu", fusions._settings()
        )  # a process has a cache of its own

    threads = [Thread(target=start) for _ in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler.compiled == 1


def test_kernels_are_told_apart_by_sizes_and_dtypes() -> None:
    """Kernels are told apart by text and device, too. Their tensors are contiguous, and torch's cache knows the rest."""
    asked = (((4, 8), "float32"), ((2, 8), "float32"), ((2, 8), "float64"))
    made = [compiled_fusion(GATED, (spec, spec), "cpu") for spec in asked]
    assert made[0] is compiled_fusion(GATED, (asked[0],) * 2, "cpu")
    for call, (shape, dtype) in zip(made, asked, strict=True):
        given = drawn(*shape).to(getattr(torch, dtype))
        (out,) = call([given, given])
        assert (out.shape, out.dtype) == (shape, given.dtype)


def test_a_fusion_follows_the_default_dtype() -> None:
    """A quotient of integers is of that dtype."""
    source = """def fusion(args):
    a0, = args
    args.clear()
    quotient = torch.ops.aten.div.Tensor(a0, 3)
    return (torch.ops.aten.mul.Tensor(quotient, 3e9),)
"""
    found = {}
    try:
        for default in (torch.float32, torch.float64):
            torch.set_default_dtype(default)
            form = lowered(source, (((5,), "int64"),), "cpu")
            (out,) = compiled_fusion(source, (((5,), "int64"),), "cpu")([torch.arange(5)])
            assert torch.equal(out, torch.arange(5) / 3 * 3e9) and out.dtype == default
            found[default] = form.moved
    finally:
        torch.set_default_dtype(torch.float32)
    assert [*found.values()] == [(5 * (8 + 4),), (5 * (8 + 8),)]


def test_a_fusion_without_inputs_compiles() -> None:
    source = """def fusion(args):
    args.clear()
    total = torch.ops.aten.add.Tensor(torch.ops.aten.full.default([6], 2.0), 1)
    return (total,)
"""
    (out,) = compiled_fusion(source, (), "cpu")([])
    assert out.tolist() == [3.0] * 6
