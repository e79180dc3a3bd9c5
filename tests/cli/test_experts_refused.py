"""Experts of other models than the catalog's, and what devices cannot share of them: refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import ANY, Mesh, Strategy, recipes, where
from piper_ir.ground.errors import CompileError, DirectiveError, PiperError, SelectorError
from piper_runtime import Job
from tests.helpers import compositions, parity
from tests.helpers.cases import each_case

E, C, W, H = 4, 2, 6, 10
PAIR = Mesh(ep=2)
ROWS = recipes.data_parallel(over=("dp", "ep"))
STAGES = (
    piper.partition(stages=2),
    *(piper.place(where(stage=r), on=dict(ep=r)) for r in range(2)),
)
"""A pipeline along the axis of experts."""


class Mixture(nn.Module):
    """Layers in which every fourth of a row's places goes to one expert; `kind` is what is special about the experts.

    The plain one has two layers, the others one, since a second one is traced anew: its input has a gradient.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind) for _ in range(1 if kind else 2))
        self.out = nn.Linear(W, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        y: Tensor = self.out(x)
        return y


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = (
            nn.Parameter(torch.empty(s).normal_(std=0.3)) for s in ((E, W, H), (E, H, W))
        )
        self.bias = nn.Parameter(torch.empty(H).normal_(std=0.3))
        self.router = nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        x = self.router(x)
        if self.kind == "routes inside":
            with piper.region(experts=0):
                return self.computed(x.view(rows, E, C, W)).reshape(rows, E * C, W)
        tokens = (
            x.view(rows, E, C, W)
            .transpose(0, 1 if self.kind == "experts first" else 0)
            .contiguous()
        )
        with piper.region(experts=0):
            tokens = tokens.transpose(0, 1 if self.kind == "experts first" else 0)
            y = self.computed(tokens)
        if self.kind == "used outside":
            y = y + self.down.sum()
        return y.reshape(rows, E * C, W)

    def computed(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        stacked = x.transpose(0, 1).reshape(E, rows * C, W)
        hidden = torch.bmm(stacked, self.up)
        if self.kind == "bias":
            hidden = hidden + self.bias
        if self.kind == "bias by Fourier":
            hidden = hidden + torch.fft.fft(self.bias).real
        hidden = F.dropout(F.silu(hidden), 0.1 if self.kind == "dropout" else 0.0)
        if self.kind == "softmax over experts":
            hidden = hidden.softmax(0)
        return torch.bmm(hidden, self.down).view(E, rows, C, W).transpose(0, 1)


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    made = [
        torch.randn(E * C, W + 1, generator=torch.Generator().manual_seed(100 * step + r))
        for r in rows
    ]
    both = torch.stack(made)
    return both[..., :W], both[..., W:]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def job(kind: str) -> Job:
    return Job(
        functools.partial(Mixture, kind),
        batch,
        loss,
        compositions.adamw,
        global_batch=8,
        precision=piper.Precision(params="float64"),
        clip_norm=0.5,
    )


def compiled(kind: str, mesh: Mesh = PAIR, **shard: Any) -> Any:
    given = dict(over="ep", index="experts", stream="rows") | shard
    selection = given.pop("selection", where(experts=ANY))
    return piper.compile(job(kind), Strategy(mesh, [piper.shard(selection, **given), ROWS]))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["", "experts first", "bias"])
def test_experts_of_any_form_are_one_device(kind: str) -> None:
    """With rows or experts first, and with a bias that all experts share: its gradient is a sum over them."""
    made = compiled(kind, Mesh(ep=4, dp=2))
    found = piper.execute(made, steps=2, launcher="inline", gradients=True)
    expected = parity.reference(job(kind), replicas=8, microbatches=1, steps=2)
    parity.assert_parity(found, expected)


@pytest.mark.long
def test_experts_of_one_layer_alone() -> None:
    """The other layer's are whole on every device, and replicas along ep, too."""
    made = compiled("", selection=where(layer=0, experts=ANY))
    found = piper.execute(made, steps=2, launcher="inline", gradients=True)
    parity.assert_parity(found, parity.reference(job(""), replicas=2, microbatches=1, steps=2))
    assert {p.name: len(p.layout) for p in made.plan.params if p.name.endswith(".up")} == {
        "layers.0.up": 1,
        "layers.1.up": 0,
    }


REFUSED: list[tuple[Callable[[], Any], type[PiperError], str]] = [
    (
        lambda: compiled("", Mesh(ep=3)),
        DirectiveError,
        "experts of layer0_experts0: 3 devices cannot share 4 evenly; 2 can",
    ),
    (lambda: compiled("dropout"), DirectiveError, "layer0_experts0 draws random numbers"),
    (
        lambda: compiled("bias by Fourier"),
        DirectiveError,
        "parameter 'layers.0.bias' of layer0_experts0 has no dimension of experts, and its gradient is no sum over "
        "them",
    ),
    (
        lambda: compiled("routes inside"),
        DirectiveError,
        "passes between experts and the rest, and no dimension of it",
    ),
    (
        lambda: compiled("used outside"),
        DirectiveError,
        "no device could have its own part of .*layers.0.down in layer0_experts0: chunks",
    ),
    (
        lambda: compiled("softmax over experts"),
        DirectiveError,
        "softmax .* wants all experts of layer0_experts0; leave it out",
    ),
    (lambda: compiled("", index="hidden"), DirectiveError, "passes between experts and the rest"),
    (
        lambda: compiled("", index="width"),
        DirectiveError,
        "index is called 'width'|indexes are called 'width'",
    ),
    (
        lambda: compiled("", index=("experts", "hidden")),
        DirectiveError,
        "one index is named, .* condition 11",
    ),
    (lambda: compiled("", index=()), DirectiveError, "one index is named"),
    (
        lambda: compiled("", keep=True),
        DirectiveError,
        "keep=True: nothing is gathered .* condition 11",
    ),
    (
        lambda: compiled("", channel="compute"),
        DirectiveError,
        "channel='compute'; the name of a stream other .* condition 11",
    ),
    (
        lambda: compiled("", sms=-1),
        DirectiveError,
        r"sms=-1; a number from 0 \(copy engines\) to 4096, or None",
    ),
    (
        lambda: compiled("", sms=10**6),
        DirectiveError,
        "sms=1000000; a number from 0 .* condition 11",
    ),
    (
        lambda: compiled("", selection=where()),
        DirectiveError,
        r"selects all chunks; .*shard\(where\(experts=ANY\), .* condition 1",
    ),
    (
        lambda: compiled("", selection=where(), index="heads"),
        DirectiveError,
        r"selects all chunks; .*where\(experts=ANY\)",
    ),
    (
        lambda: compiled("", selection=where(layer=0)),
        DirectiveError,
        r"layer0 reads the batch, .*; where\(experts=ANY\) selects the regions of experts alone",
    ),
    (
        lambda: compiled("", selection=where(layer=7)),
        DirectiveError,
        r"where\(layer=7\) selects no chunk; where\(experts=ANY\) selects the regions of experts "
        r"alone",
    ),
    (
        lambda: compiled("", stream=""),
        DirectiveError,
        r"stream='' shares all chunks.*stream=\"rows\"\) .*condition 1",
    ),
    (
        lambda: compiled("", stream="tokens"),
        DirectiveError,
        r"stream='tokens' shares all chunks.*stream=\"rows\"\)",
    ),
    (
        lambda: compiled("softmax over experts", selection=where(), stream=""),
        DirectiveError,
        r"index='experts'\): devices cannot share it in .*; devices share the experts "
        r".*stream=\"rows\"\)",
    ),
    (
        lambda: compiled("", bound=2.0, overflow="drop"),
        DirectiveError,
        r"bound=2.0 and overflow='drop': only dropless mixtures take that, and layer0_experts0 has "
        r".*capacity_factor=None",
    ),
    (
        lambda: compiled("", overflow="error"),
        DirectiveError,
        "'rows'\\): overflow='error': only dropless mixtures take that",
    ),
    (
        lambda: piper.shard(where(), channel="x") and compiled("", stream="", channel="x"),
        DirectiveError,
        "channel and sms are",
    ),
    (
        lambda: piper.compile(job(""), Strategy(PAIR, recipes.expert_parallel())),
        CompileError,
        r"name ep in replicate, too, as in replicate\(where\(\), over=\('ep',\)\)",
    ),
    (
        lambda: piper.compile(
            job(""),
            Strategy(Mesh(ep=2, dp=2), [recipes.expert_parallel(), recipes.data_parallel()]),
        ),
        CompileError,
        r"replicate\(where\(\), over=\('dp', 'ep'\)\)",
    ),
    (
        lambda: piper.compile(job(""), Strategy(PAIR, [recipes.expert_parallel(), *ROWS, *STAGES])),
        DirectiveError,
        r"devices share experts over ep \(by shard\).*pp and ep of Mesh\(pp=2, ep=2\) \[place "
        r"condition 7\]",
    ),
    (
        lambda: piper.compile(
            job(""), Strategy(Mesh(dp=2), [recipes.expert_parallel(), recipes.data_parallel()])
        ),
        DirectiveError,
        r"Mesh\(dp=2\) has no ep, .*Mesh\(ep=2\), .*data_parallel\(over=\('dp', 'ep'\)\).* \[shard "
        r"condition 2\]",
    ),
    (
        lambda: piper.compile(
            compiled("").program, Strategy(Mesh(ep=4), [recipes.expert_parallel(), ROWS])
        ),
        DirectiveError,
        "the program has no code that could be rewritten",
    ),
    (
        lambda: piper.compile(compiled("").program, Strategy(PAIR, ROWS)),
        CompileError,
        "the program was made for devices that share experts over ep; compile its job, or keep shard",
    ),
    (
        lambda: piper.compile(
            piper.synthetic(stages=2, F=1, I=1, W=1),
            Strategy(PAIR, [recipes.expert_parallel(), ROWS]),
        ),
        DirectiveError,
        "the program has no code that could be rewritten; compile a job, not a program .* condition 4",
    ),
    (
        lambda: piper.compile(
            job(""),
            Strategy(
                Mesh(ep=2, cp=2),
                [recipes.expert_parallel(), recipes.expert_parallel(over="cp"), ROWS],
            ),
        ),
        DirectiveError,
        "shares the same already, over ep; keep one of the two .* condition 5",
    ),
    (
        lambda: piper.compile(
            job(""), Strategy(Mesh(), [piper.order(where(experts=0), where(layer=1))])
        ),
        SelectorError,
        "no coordinate 'experts'",
    ),
]


@pytest.mark.long
@each_case(("compiling", "error", "message"), REFUSED)
def test_what_is_wrong_is_one_message(
    compiling: Callable[[], Any], error: type[PiperError], message: str
) -> None:
    with pytest.raises(error, match=message):
        compiling()


def test_an_axis_of_one_device_changes_nothing() -> None:
    plain = piper.compile(job(""), Strategy(Mesh(dp=2), ROWS))
    assert compiled("", Mesh(dp=2)).plan.key == plain.plan.key
