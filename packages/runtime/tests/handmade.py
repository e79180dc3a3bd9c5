"""A small model as a module, as a program and as step code, all written by hand: what the runtime is tested with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from piper_ir.ground.draws import Draw
from piper_ir.ground.sizes import Affine, TensorSpec
from piper_ir.program.program import (
    BatchTensor,
    Buffer,
    Chunk,
    Input,
    Output,
    Param,
    Program,
    Signature,
    Step,
)
from piper_runtime.rank.job.job import Job
from piper_runtime.rank.job.precision import Precision
from piper_runtime.rank.values.code import ShippedCode
from piper_runtime.rank.values.rng import rng_seed

WIDTH = 4
DROP = 0.25
_R = Affine(0, 1)


class Chain(nn.Module):
    """y = tanh(x @ w), layer after layer, and a linear head. `tied`: the head uses the weight of the first layer."""

    def __init__(self, layers: int, tied: bool = False, drop: bool = False) -> None:
        super().__init__()
        self.layers = nn.ParameterList(
            [nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.5) for _ in range(layers)]
        )
        self.head = self.layers[0] if tied else nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.5)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))
        self.drop = drop
        self.seed_layer: Callable[[int], None] = lambda layer: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, w in enumerate(self.layers):
            if k == 0:
                self.count += 1
            x = torch.tanh(x @ w)
            if self.drop:
                self.seed_layer(k)
                x = x * (torch.rand_like(x) >= DROP)
        return x @ self.head


def mean_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output - targets).square().mean()


def masked_loss(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = (targets[:, :1] > 0).to(output.dtype)
    return ((output - targets).square() * mask).sum(), mask.sum()


def batch(step: int, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a made-up data set; a row's content depends on its number and the step only."""
    found = []
    for row in rows:
        g = torch.Generator().manual_seed(1000 * step + row)
        found.append(torch.randn(2, WIDTH, generator=g, dtype=torch.float64))
    both = torch.stack(found)
    return both[:, 0].clone(), both[:, 1].clone()


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    head = [p for n, p in named if n == "head"]
    rest = [p for n, p in named if n != "head"]
    return torch.optim.AdamW(
        [{"params": rest, "weight_decay": 0.1}, {"params": head, "lr": 0.02}], lr=0.01
    )


def chain_job(
    layers: int, global_batch: int, *, tied: bool = False, drop: bool = False, **more: Any
) -> Job:
    fields: dict[str, Any] = {
        "loss": mean_loss,
        "optimizer": sgd,
        "precision": Precision(params="float64"),
        "seed": 3,
        "batch": batch,
        "draws": "microbatches",
    }
    return Job(
        model=lambda: Chain(layers, tied, drop), global_batch=global_batch, **{**fields, **more}
    )


def chain_program(
    layers: int, *, tied: bool = False, drop: bool = False, masked: bool = False
) -> Program:
    """The program of a Chain in float64."""
    weight, act = _spec(WIDTH, WIDTH), _spec(_R, WIDTH)
    chunks = [_layer(k, drop, "head" if tied and k == 0 else f"layers.{k}") for k in range(layers)]
    source = f"layer{layers - 1}:out0"
    inputs = (
        Input("value", source, act, True),
        Input("param", "head", weight, True),
        Input("batch", "targets", act),
    )
    outputs = [Output("loss", _spec(), needs_grad=True)] + (
        [Output("weight", _spec())] if masked else []
    )
    ports = {
        "in0": act,
        "in1": weight,
        "in2": act,
        "out0": _spec(),
        "out1": _spec(),
        "tan0": _spec(),
    }
    ports |= {"saved0": act, "gin0": act, "iw0": act}
    out = ("out0", "out1", "saved0") if masked else ("out0", "saved0")
    steps: dict[Step, Signature] = {
        "F": Signature(("in0", "in1", "in2"), out),
        "I": Signature(("in1", "saved0", "tan0"), ("gin0", "iw0")),
        "W": Signature(("in0", "iw0"), (), (1,)),
    }
    code = "head.sum" if masked else "head.mean"
    chunks.append(Chunk("head", {"layer": layers}, inputs, tuple(outputs), ports, steps, code))
    params = [
        Param("head", weight, ("layers.0",) if tied else ()),
        Param("frozen", _spec(3), trained=False),
    ]
    params += [Param(f"layers.{k}", weight) for k in range(tied, layers)]
    tensors = (BatchTensor("inputs", act), BatchTensor("targets", act))
    return Program(
        tuple(chunks),
        tuple(params),
        (Buffer("count", _spec()),),
        tensors,
        loss_kind="sum" if masked else "mean",
    )


def _spec(*shape: Any) -> TensorSpec:
    return TensorSpec(shape, "float64")


def _layer(k: int, drop: bool, param: str) -> Chunk:
    weight, act = _spec(WIDTH, WIDTH), _spec(_R, WIDTH)
    first = (
        Input("batch", "inputs", act) if k == 0 else Input("value", f"layer{k - 1}:out0", act, True)
    )
    inputs = [first, Input("param", param, weight, True)]
    outputs = [Output("value", act, needs_grad=True)]
    ports = {
        "in0": act,
        "in1": weight,
        "out0": act,
        "tan0": act,
        "saved0": act,
        "gin0": act,
        "iw0": act,
    }
    kept = ("saved0",) if drop else ()
    steps: dict[Step, Signature] = {
        "F": Signature(("in0", "in1"), ("out0", *kept)),
        "I": Signature(("in1", "out0", *kept, "tan0"), ("gin0", "iw0")),
        "W": Signature(("in0", "iw0"), (), (1,)),
    }
    code = "drop" if drop else "plain"
    if k == 0:
        inputs.append(Input("buffer", "count", _spec()))
        outputs.append(Output("buffer", _spec(), "count", varies=False))
        ports |= {"in2": _spec(), "out1": _spec()}
        steps["F"] = Signature(("in0", "in1", "in2"), ("out0", "out1", *kept))
        steps["I"] = Signature((), ())
        steps["W"] = Signature(("in0", "out0", *kept, "tan0"), (), (1,))
        code += ".first"
    draws = (Draw(f"{k}#0", (1, 0)),) if drop else ()
    return Chunk(
        f"layer{k}",
        {"layer": k},
        tuple(inputs),
        tuple(outputs),
        ports,
        steps,
        code,
        random=drop,
        draws=draws,
    )


_HEAD = """
def step(args):
    x, w, t = args
    args.clear()
    diff = x @ w; del x, w
    diff -= t
"""
_SOURCES: dict[str, dict[str, str]] = {
    "plain": {
        "F": "def step(args):\n    x, w = args\n    args.clear()\n    y = torch.mm(x, w); del x\n    return "
        "(y.tanh_(),)",
        "I": """
def step(args):
    w, y, g = args
    args.clear()
    dz = torch.ops.aten.tanh_backward(g, y); del g, y
    return (torch.mm(dz, w.t()), dz)
""",
        "W": "def step(args):\n    x, dz, acc = args\n    args.clear()\n    acc.addmm_(x.t(), dz)\n    return ()",
    },
    "plain.first": {
        "F": """
def step(args):
    x, w, n = args
    args.clear()
    return (torch.mm(x, w).tanh_(), n + 1)
""",
        "W": """
def step(args):
    x, y, g, acc = args
    args.clear()
    dz = torch.ops.aten.tanh_backward(g, y); del g, y
    acc.addmm_(x.t(), dz)
    return ()
""",
    },
    "drop": {
        "F": f"""
from piper_ops import draw

def step(args):
    x, w = args
    args.clear()
    mask = (draw(0, torch.ops.aten.rand.default, list(x.shape), dtype=x.dtype) >= {DROP}).to(x.dtype)
    return (torch.mm(x, w).tanh_().mul_(mask), mask)
""",
        "I": """
def step(args):
    w, y, mask, g = args
    args.clear()
    dz = torch.ops.aten.tanh_backward(g * mask, y)
    return (torch.mm(dz, w.t()), dz)
""",
        "W": "def step(args):\n    x, dz, acc = args\n    args.clear()\n    acc.addmm_(x.t(), dz)\n    return ()",
    },
    "drop.first": {
        "F": f"""
from piper_ops import draw

def step(args):
    x, w, n = args
    args.clear()
    mask = (draw(0, torch.ops.aten.rand.default, list(x.shape), dtype=x.dtype) >= {DROP}).to(x.dtype)
    return (torch.mm(x, w).tanh_().mul_(mask), n + 1, mask)
""",
        "W": """
def step(args):
    x, y, mask, g, acc = args
    args.clear()
    acc.addmm_(x.t(), torch.ops.aten.tanh_backward(g * mask, y))
    return ()
""",
    },
    "head.mean": {
        "F": _HEAD + "    del t\n    return (diff.square().mean(), diff)",
        "I": """
def step(args):
    w, diff, g = args
    args.clear()
    d = diff * (2 * g / diff.numel()); del diff
    return (torch.mm(d, w.t()), d)
""",
        "W": "def step(args):\n    x, d, acc = args\n    args.clear()\n    acc.addmm_(x.t(), d)\n    return ()",
    },
    "head.sum": {
        "F": _HEAD
        + """
    mask = (t[:, :1] > 0).to(t.dtype)
    loss = (diff.square() * mask).sum()
    diff *= mask
    return (loss, mask.sum(), diff)
""",
        "I": """
def step(args):
    w, diff, g = args
    args.clear()
    d = diff * (2 * g); del diff
    return (torch.mm(d, w.t()), d)
""",
        "W": "def step(args):\n    x, d, acc = args\n    args.clear()\n    acc.addmm_(x.t(), d)\n    return ()",
    },
}

CODE = {
    code: {step: ShippedCode(text) for step, text in steps.items()}
    for code, steps in _SOURCES.items()
}


class Reference:
    """One device, plain PyTorch, a loop over the microbatches in the order of rows."""

    def __init__(self, job: Job, rows: int) -> None:
        torch.manual_seed(job.seed)
        self.model = job.model().to(job.precision.dtype)
        self._job, self._rows = job, rows
        named = list(self.model.named_parameters())
        self._optimizer = job.optimizer(named)
        self._scheduler = job.scheduler(self._optimizer) if job.scheduler else None
        self.gradients: list[dict[str, torch.Tensor]] = []

    def step(self, step: int) -> float:
        """One optimizer step; returns its loss."""
        job, losses, weights = self._job, [], []
        parts = job.global_batch // self._rows
        for k in range(parts):
            first = k * self._rows
            x, t = job.batch(step, range(first, first + self._rows))
            self.model.seed_layer = lambda layer, first=first: torch.manual_seed(
                rng_seed(job.seed, step, first, f"{layer}#0")
            )
            loss = job.loss(self.model(x.to(job.precision.dtype)), t.to(job.precision.dtype))
            if isinstance(loss, tuple):
                losses.append(loss[0].item())
                weights.append(loss[1].item())
                loss[0].backward()
            else:
                losses.append(loss.item() / parts)
                (loss / parts).backward()
        return self._update(sum(losses), sum(weights) if weights else 1.0)

    def _update(self, loss: float, weight: float) -> float:
        trained = [(n, p) for n, p in self.model.named_parameters() if p.grad is not None]
        for _, p in trained:
            p.grad /= weight
        if self._job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for _, p in trained], self._job.clip_norm)
        self.gradients.append({n: p.grad.clone() for n, p in trained})
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._scheduler is not None:
            self._scheduler.step()
        return loss / weight
