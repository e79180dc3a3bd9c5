"""Advice in a refusal keeps the model what it is, and what it names exists.

Each row of the table is a model that is refused, what the message must advise, and the model as advised. Both are
trained in plain PyTorch, where they must be the same, and the advised one by a plan, which must equal plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import piper
from piper.api.reference.reference import reference
from piper.api.reference.verification import verify_strategy
from piper_ir.ground.errors import CaptureError
from piper_ops import REFUSALS

ROOT = Path(__file__).resolve().parents[2]
ROWS, LENGTH, WIDTH, CLASSES = 8, 5, 8, 3

Body = Callable[[Any, Tensor], Any]
SPLIT = piper.Strategy(piper.Mesh(), (piper.split(piper.where(), microbatches=2),))


class Net(nn.Module):
    """A few parts that bodies use; `build` may change them."""

    def __init__(self, body: Body, build: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.linspace(-1, 1, LENGTH * LENGTH).view(LENGTH, LENGTH))
        self.register_buffer("count", torch.zeros(()))
        self.body = body
        if build is not None:
            build(self)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = (
        torch.linspace(-1, 1, ROWS * LENGTH * WIDTH).view(ROWS, LENGTH, WIDTH)[
            rows.start : rows.stop
        ]
        + step
    )
    return x, (x[:, 0, 0] * 10).long() % CLASSES


def squares(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


@dataclass(frozen=True)
class Row:
    """before, after: bodies of the model; build: what each changes on the model first; losses: by default the same
    squares."""

    says: str
    before: Body
    after: Body
    build: tuple[Callable[[Any], None] | None, Callable[[Any], None] | None] = (None, None)
    losses: tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]] = (squares, squares)
    named: bool = True  # both models have the same parameters

    def jobs(self) -> tuple[piper.Job, piper.Job]:
        out = [
            job(lambda b=b, c=c: Net(b, c), loss)
            for b, c, loss in zip((self.before, self.after), self.build, self.losses)
        ]
        return out[0], out[1]


def job(model: Callable[[], nn.Module], loss: Callable[[Any, Any], Any]) -> piper.Job:
    def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=0.1)

    return piper.Job(
        model, batch, loss, sgd, global_batch=ROWS, precision=piper.Precision(params="float64")
    )


def heads(x: Tensor) -> Tensor:
    return x.view(-1, LENGTH, 2, WIDTH // 2).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def opaque(body: Body) -> Body:
    def inside(net: Any, x: Tensor) -> Any:
        with piper.region(opaque=True):
            return body(net, x)

    return inside


def scores_of(net: Any, x: Tensor) -> Tensor:
    return net.linear(x)[:, 0, :CLASSES]


def legacy(x: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x, t, size_average=False)


def ctc(x: Tensor, t: Tensor) -> Tensor:
    scores = x.log_softmax(-1).transpose(0, 1)
    lengths = torch.full_like(t, LENGTH)
    return F.ctc_loss(scores, t[:, None].clamp(min=1), lengths, torch.ones_like(t))


def by_margins(net: Any, x: Tensor) -> Tensor:
    classes = torch.where(first_token(x), 1, -1)  # and padding
    margins = F.multilabel_margin_loss(net.linear(x)[:, 0, :LENGTH], classes, reduction="none")
    return x * margins[:, None, None]


@torch.library.custom_op("piper_advice::ctc", mutates_args=())
def registered_ctc(scores: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    lengths = torch.full_like(t, LENGTH)
    return torch.ops.aten._ctc_loss.Tensor(
        scores, t[:, None].clamp(min=1), lengths, torch.ones_like(t)
    )


@torch.library.custom_op("piper_advice::ctc_backward", mutates_args=())
def registered_ctc_backward(
    grad: Tensor, scores: Tensor, t: Tensor, losses: Tensor, alpha: Tensor
) -> Tensor:
    lengths, backward = torch.full_like(t, LENGTH), torch.ops.aten._ctc_loss_backward.Tensor
    return backward(
        grad, scores, t[:, None].clamp(min=1), lengths, torch.ones_like(t), losses, alpha, 0
    )


def save_for_ctc(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


registered_ctc.register_fake(
    lambda scores, t: (scores.new_empty(t.shape[0]), scores.new_empty(t.shape[0], LENGTH, 3))
)
registered_ctc_backward.register_fake(
    lambda grad, scores, t, losses, alpha: torch.empty_like(scores)
)
registered_ctc.register_autograd(
    lambda ctx, grad, _: (registered_ctc_backward(grad.contiguous(), *ctx.saved_tensors), None),
    setup_context=save_for_ctc,
)


def ctc_as_registered(x: Tensor, t: Tensor) -> Tensor:
    return registered_ctc(x.log_softmax(-1).transpose(0, 1).contiguous(), t)[0].mean()


def add_attention(net: Any, name: str = "attention", batch_first: bool = True) -> None:
    setattr(net, name, nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first))


def fixed(net: Any) -> list[Tensor]:
    return [p.detach() for p in net.attention.parameters()]


def first_token(x: Tensor) -> Tensor:
    return (torch.arange(LENGTH) == 0).expand(x.shape[0], LENGTH)


def add_encoder(nested: bool) -> Callable[[Any], None]:
    def add(net: Any) -> None:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True)
        net.encoder = (
            nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested)
            .requires_grad_(False)
            .eval()
        )

    return add


def add_complex(net: Any) -> None:
    net.phase = nn.Parameter(torch.complex(torch.ones(WIDTH), torch.ones(WIDTH)))


def add_parts(net: Any) -> None:
    net.real, net.imaginary = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))


def add_hook(net: Any) -> None:
    net.bias.register_hook(lambda grad: grad * 0.5)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]  # one gradient
        return grad * 0.5


def add_embedding(sparse: bool) -> Callable[[Any], None]:
    def add(net: Any) -> None:
        net.embedding = nn.Embedding(4, WIDTH, sparse=sparse)

    return add


def share_data(net: Any) -> None:
    net.out.weight = nn.Parameter(net.linear.weight.data)


def share_parameter(net: Any) -> None:
    net.out.weight = net.linear.weight


def view_data(net: Any) -> None:
    net.register_buffer("top", net.linear.weight.data[:2])


GLOBAL = torch.linspace(0, 1, WIDTH)


def add_global(net: Any) -> None:
    net.register_buffer("scale", GLOBAL.clone(), persistent=False)


def changed_view(net: Any, x: Tensor, stages: tuple[int, int]) -> Tensor:
    with piper.region(stage=stages[0]):
        y = net.linear(x)
    with piper.region(stage=stages[1]):
        view = y.view(-1, LENGTH, 2, WIDTH // 2)
    with piper.region(stage=1):
        y.add_(1)
        return net.out(y) + view.flatten(2)


def counting(net: Any, x: Tensor) -> Tensor:
    net.count.add_(1)
    return net.linear(x) * net.count


def counting_in_a_region(net: Any, x: Tensor) -> Tensor:
    with piper.region(opaque=True):
        return counting(net, x)


def counting_before_a_region(net: Any, x: Tensor) -> Tensor:
    net.count.add_(1)
    with piper.region(opaque=True):
        return net.linear(x) * net.count


def positive_entries(net: Any, x: Tensor) -> Tensor:
    y = net.linear(x)
    kept = torch.zeros_like(y)
    kept[y > 0] = y[y > 0]
    return kept + net.out(y)


def positive_entries_by_mask(net: Any, x: Tensor) -> Tensor:
    y = net.linear(x)
    return torch.where(y > 0, y, 0.0) + net.out(y)


ROWS_OF_THE_TABLE: dict[str, Row] = {
    "legacy arguments": Row(
        r"reduction='mean', 'sum'",
        scores_of,
        scores_of,
        losses=(legacy, lambda x, t: F.cross_entropy(x, t, reduction="sum")),
    ),
    "attention of inference": Row(
        r"Call nn\.MultiheadAttention",
        lambda net, x: net.linear(
            torch._native_multi_head_attention(x, x, x, WIDTH, 2, *fixed(net))[0]
        ),
        lambda net, x: net.linear(net.attention(x, x, x)[0].detach()),
        build=(add_attention, add_attention),
    ),
    "padding of an encoder in eval mode": Row(
        r"Make it with enable_nested_tensor=False",
        lambda net, x: net.linear(net.encoder(x, src_key_padding_mask=first_token(x))),
        lambda net, x: net.linear(net.encoder(x, src_key_padding_mask=first_token(x))),
        build=(add_encoder(True), add_encoder(False)),
    ),
    "attention over rows": Row(
        r"made with batch_first=True",
        lambda net, x: net.swapped(x, x, x, need_weights=False)[0],
        lambda net, x: net.attention(x, x, x, need_weights=False)[0],
        build=(lambda net: add_attention(net, "swapped", False), add_attention),
        named=False,
    ),
    "instance norm": Row(
        r"track_running_stats=False",
        lambda net, x: F.instance_norm(
            net.linear(x), *(torch.ones(LENGTH, dtype=x.dtype) for _ in "mv")
        ),
        lambda net, x: F.instance_norm(net.linear(x)),
    ),
    "native layer norm": Row(
        r"F\.layer_norm",
        lambda net, x: torch.native_layer_norm(net.linear(x), (WIDTH,), None, None, 1e-5)[0],
        lambda net, x: F.layer_norm(net.linear(x), (WIDTH,)),
    ),
    "ctc": Row(
        r"torch\.library\.custom_op.*register_fake, register_autograd",
        lambda net, x: net.linear(x)[..., : CLASSES + 1],
        lambda net, x: net.linear(x)[..., : CLASSES + 1],
        losses=(ctc, ctc_as_registered),
    ),
    "margins of several labels": Row(r"opaque=True", by_margins, opaque(by_margins)),
    "in-place change under a view": Row(
        r"keep the view and the change in one region",
        lambda net, x: changed_view(net, x, (0, 0)),
        lambda net, x: changed_view(net, x, (1, 1)),
    ),
    "buffer of an opaque region": Row(
        r"update buffers outside of it, or remove opaque=True",
        counting_in_a_region,
        counting_before_a_region,
    ),
    "buffer of an opaque region, in the open": Row(
        r"remove opaque=True", counting_in_a_region, counting
    ),
    "complex parameter": Row(
        r"torch\.complex\(real, imaginary\)",
        lambda net, x: torch.view_as_real(net.linear(x) * net.phase).sum(-1),
        lambda net, x: torch.view_as_real(
            net.linear(x) * torch.complex(net.real, net.imaginary)
        ).sum(-1),
        build=(add_complex, add_parts),
        named=False,
    ),
    "hook": Row(
        r"torch\.autograd\.Function whose backward is the hook",
        lambda net, x: net.linear(x).mT @ net.bias,
        lambda net, x: net.linear(x).mT @ Halved.apply(net.bias),
        build=(add_hook, None),
    ),
    "sparse embedding": Row(
        r"sparse=False",
        lambda net, x: net.embedding((x[..., 0] > 0).long()),
        lambda net, x: net.embedding((x[..., 0] > 0).long()),
        build=(add_embedding(True), add_embedding(False)),
    ),
    "function in an opaque region": Row(
        r"remove opaque=True",
        opaque(lambda net, x: Halved.apply(net.linear(x))),
        lambda net, x: Halved.apply(net.linear(x)),
    ),
    "tensor that is no part of the model": Row(
        r"register_buffer",
        lambda net, x: net.linear(x) * GLOBAL,
        lambda net, x: net.linear(x) * net.scale,
        build=(None, add_global),
    ),
    "shape that depends on values": Row(
        r"torch\.where, masks", positive_entries, positive_entries_by_mask
    ),
    "shared memory": Row(
        r"`b\.weight = a\.weight` ties parameters",
        lambda net, x: net.out(net.linear(x)),
        lambda net, x: net.out(net.linear(x)),
        build=(share_data, share_parameter),
        named=False,
    ),
    "view that a buffer keeps": Row(
        r"make the view in forward",
        lambda net, x: net.linear(x) @ net.top.mT,
        lambda net, x: net.linear(x) @ net.linear.weight.detach()[:2].mT,
        build=(view_data, None),
    ),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", ROWS_OF_THE_TABLE)
def test_a_refused_model_works_as_advised(name: str) -> None:
    row = ROWS_OF_THE_TABLE[name]
    refused, advised = row.jobs()
    with pytest.raises(CaptureError, match=f"(?s){row.says}"):
        piper.compile(refused, SPLIT)
    report = verify_strategy(advised, SPLIT)
    assert report.equal, report.text()
    if name in NOT_COMPARED:
        return
    before, after = reference(refused, microbatches=2), reference(advised, microbatches=2)
    assert before.losses == pytest.approx(after.losses, rel=1e-9)
    for ours, theirs in zip(before.gradients, after.gradients, strict=True) if row.named else ():
        assert ours.keys() == theirs.keys()
        for key in ours:
            torch.testing.assert_close(ours[key].to_dense(), theirs[key], rtol=1e-9, atol=1e-12)


NOT_COMPARED = {
    "attention over rows",  # it is another model: rows attend to rows
    "shared memory",  # the reference separates what shares memory when it casts the model
    "view that a buffer keeps",
    "complex parameter",  # ... and makes complex parameters real
    "tensor that is no part of the model",  # ... and leaves what is not the model's in float32
}


def only_named(body: Body, loss: Callable[[Any, Any], Any] = squares) -> str:
    with pytest.raises(CaptureError) as caught:
        piper.compile(job(lambda: Net(body), loss), SPLIT)
    return str(caught.value)


def autocast(net: Any, x: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return net.linear(x)


def test_where_nothing_equals_the_model_the_message_says_that_too() -> None:
    norm = only_named(
        lambda net, x: F.batch_norm(net.linear(x).flatten(1), None, None, training=True)
    )
    assert (
        'Job(batch_norm="microbatch") takes the statistics' in norm
        and "Other models that a plan trains" in norm
    )
    mixed = only_named(autocast)
    assert "Job(precision=Precision(params='float32', compute='bfloat16'))" in mixed
    precision = piper.Precision(params="float32", compute="bfloat16")
    trained = replace(job(lambda: Net(lambda net, x: net.linear(x)), squares), precision=precision)
    assert piper.compile(trained, SPLIT).plan
    assert "Make it once, by create_block_mask in the constructor" in only_named(_flex)


@pytest.mark.long
def test_every_refusal_of_an_operator_is_in_the_table() -> None:
    """What messages of rows say of an operator is the reason of its refusal.

    Dynamo refuses ctc_loss before we do; recurrent layers are refused only in the model's own forward, and autocast
    only in what is traced by itself.
    """
    said = "\n".join([*map(message_of, ROWS_OF_THE_TABLE.values()), *map(only_named, [_norm])])
    missing = {
        refusal.reason
        for target, refusal in REFUSALS.items()
        if refusal.reason not in said and target not in ELSEWHERE
    }
    assert not missing


def message_of(row: Row) -> str:
    with pytest.raises(CaptureError) as caught:
        piper.compile(row.jobs()[0], SPLIT)
    return str(caught.value)


CELLS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu, torch.lstm_cell, torch.gru_cell)
ELSEWHERE = (F.ctc_loss, torch.ctc_loss, *CELLS, torch.amp.autocast_mode._enter_autocast)


def _norm(net: Any, x: Tensor) -> Tensor:
    return F.batch_norm(net.linear(x).flatten(1), None, None, training=True)


def _flex(net: Any, x: Tensor) -> Tensor:
    q = heads(net.linear(x))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device="cpu")
    return joined(flex_attention(q, q, q, block_mask=mask))
