"""Attention whose tokens devices share is the attention of one: by a ring or gathered keys, in blocks or in zigzag
order.

The faults are those that such code has had elsewhere; each gives wrong numbers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from packages.capture.tests.joint_harness import Case
from packages.capture.tests.lockstep import Judged, joint_of, judged, shared_by
from piper_capture.steps.kernels import flops_of
from piper_ir.ground.errors import DirectiveError
from piper_ir.program.layout import Sharding
from piper_ops import attention, attention_dgrad
from tests.faults.ring_faults import FAULTS
from tests.helpers.cases import each_case

ROWS, HEADS, KEYS, ELEMENTS = 2, 4, 2, 3
WIDTH = HEADS * ELEMENTS
EXACT = 1e-12
ORDERS, WAYS = ("zigzag", "blocks"), ("ring", "gather")


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@cache
def layer(tokens: int, causal: bool = True, masked: bool = False) -> Case:
    """Queries, keys and values of grouped heads, their attention, and what depends on the place of a token."""

    def function(x: Tensor, q: Tensor, kv: Tensor, out: Tensor, *mask: Tensor) -> Tensor:
        x = x * torch.arange(1, tokens + 1, dtype=torch.float64).unsqueeze(1).cos()
        queries = (x @ q).view(ROWS, tokens, HEADS, ELEMENTS).transpose(1, 2)
        keys, values = (
            (x @ w).view(ROWS, tokens, KEYS, ELEMENTS).transpose(1, 2) for w in kv.chunk(2, 1)
        )
        given = {"attn_mask": mask[0]} if mask else {"is_causal": causal}
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, enable_gqa=True, scale=0.7, **given
        )
        return mixed.transpose(1, 2).reshape(ROWS, tokens, WIDTH) @ out

    weights = (
        drawn(WIDTH, WIDTH, seed=1),
        drawn(WIDTH, 2 * KEYS * ELEMENTS, seed=2),
        drawn(WIDTH, WIDTH, seed=3),
    )
    lower = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    masks = [(lower | (drawn(ROWS, 1, tokens, tokens, seed=4) > 1))] if masked else []
    kinds = ("value", "param", "param", "param", *(["batch"] if masked else []))
    return Case(
        function, kinds, (drawn(ROWS, tokens, WIDTH, seed=5), *weights, *masks), portable=True
    )


def asked(degree: int, way: str, order: str = "") -> Sharding:
    return Sharding("cp", degree, context=True, attention=way, order=order)


def shared(case: Case, degree: int, way: str, order: str = "", *more: Sharding) -> Judged:
    return judged(case, *shared_by(case, [*more, asked(degree, way, order)]))


def work(graph: fx.Graph) -> int:
    """The FLOPs of attention, forward and backward."""
    return sum(flops_of(n) for n in graph.nodes if n.target in (attention, attention_dgrad))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("way", "degree"), [("ring", 2), ("ring", 4), ("ring", 8), ("gather", 2), ("gather", 8)]
)
def test_causal_attention(degree: int, way: str, order: str) -> None:
    """In zigzag order all devices compute what is needed, an equal share each; in blocks as much as the fullest has
    to."""
    case = layer(16)
    found = shared(case, degree, way, order)
    assert found.error < EXACT
    share = work(found.shared.joint.graph) * degree / work(joint_of(case).graph)
    assert share == pytest.approx(1.0 if order == "zigzag" else 2 - 1 / degree, rel=1e-12)
    if way == "ring":
        assert (found.forward, found.backward) == ({"shift": degree - 1}, {"shift": 2 * degree - 1})


@each_case("order", ORDERS)
@each_case("way", WAYS)
def test_attention_to_all_tokens(way: str, order: str) -> None:
    """Which tokens a device has makes no difference to how much it computes."""
    case = layer(16, causal=False)
    found = shared(case, 4, way, order)
    assert found.error < EXACT
    assert work(found.shared.joint.graph) * 4 == work(joint_of(case).graph)


@pytest.mark.parametrize("order", ORDERS)
def test_a_mask_with_gathered_keys(order: str) -> None:
    """Each device takes the rows of its queries, in its order."""
    assert shared(layer(16, masked=True), 4, "gather", order).error < EXACT


@each_case("way", WAYS)
@each_case("order", ORDERS)
def test_rows_in_one_sequence_are_computed_whole(way: str, order: str) -> None:
    """A device has tokens of each row, which lie apart in the sequence."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (x @ w).view(1, ROWS * 8, 3, HEADS, ELEMENTS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(ROWS, 8, WIDTH)

    tensors = drawn(ROWS, 8, WIDTH, seed=1), drawn(WIDTH, 3 * WIDTH, seed=2)
    found = shared(Case(function, ("value", "param"), tensors, portable=True), 2, way, order)
    assert found.error < EXACT and not found.forward["shift"]


@pytest.mark.long
@each_case("way", WAYS)
@each_case("stream", ["", "tokens"])
def test_with_shared_heads(way: str, stream: str) -> None:
    """Heads of keys are shared, too, and along that axis also the tokens of what passes between layers."""
    assert shared(layer(16), 4, way, "", Sharding("tp", 2, stream=stream)).error < EXACT


def test_the_order_is_zigzag_where_attention_is_causal() -> None:
    def order(causal: bool, way: str) -> bool:
        found, _ = shared_by(layer(16, causal), [asked(2, way)])
        return any(axis.halves for axis in found.axes)

    assert [order(True, way) for way in ("ring", "gather", "heads")] == [True, True, False]
    assert not order(False, "ring") and not order(False, "gather")


def test_what_is_refused() -> None:
    with pytest.raises(
        DirectiveError,
        match=r'attention="ring": attention .* has a mask.*use attention="gather" or "heads"',
    ):
        shared_by(layer(16, masked=True), [asked(2, "ring")])
    with pytest.raises(
        DirectiveError,
        match=r"12 tokens .* by 4 devices along cp in zigzag order.*; 3 devices can share them so, "
        r"4 can",
    ):
        shared_by(layer(12), [asked(4, "ring")])
    with pytest.raises(
        DirectiveError, match=r"12 tokens cannot be shared by 8 devices .cp=8.; 6 can"
    ):
        shared_by(layer(12), [asked(8, "ring", "blocks")])
    with pytest.raises(
        DirectiveError,
        match=r"by 4 devices along cp, with 4 more for each, in zigzag order.*; 2 devices can "
        r"share them so, 4 can",
    ):
        shared_by(layer(16), [Sharding("tp", 4, stream="tokens"), asked(4, "ring")])

    def without(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    case = Case(
        without, ("value", "param"), (drawn(ROWS, 8, WIDTH, seed=1), drawn(WIDTH, WIDTH, seed=2))
    )
    with pytest.raises(
        DirectiveError,
        match="attention='ring': the model has no attention that could be computed so",
    ):
        shared_by(case, [asked(2, "ring")])

    def written_out(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout((x @ x.mT).softmax(-1), 0.1) @ x @ w

    with pytest.raises(DirectiveError, match=r"^attention='ring': _softmax .*has the scores"):
        shared_by(replace(case, function=written_out), [asked(2, "ring")])


@pytest.mark.parametrize(
    ("degree", "way_out"),
    [(2, 'use order="blocks" or attention="heads", '), (4, 'use attention="heads", ')],
)
def test_tokens_that_an_op_takes_as_too_few_blocks_are_refused_as_such(
    degree: int, way_out: str
) -> None:
    """The number of tokens is even enough, so another number of devices, or blocks in place of zigzag, need not
    help."""
    plain = layer(16)

    def in_blocks(x: Tensor, *weights: Tensor) -> Tensor:
        return plain.function(
            (x.view(ROWS, 2, 8, WIDTH) * torch.arange(1, 3).view(2, 1, 1)).view(ROWS, 16, WIDTH),
            *weights,
        )

    said = f"16 tokens as 2 blocks, which {degree} devices cannot share, two each in zigzag order; {way_out}"
    with pytest.raises(DirectiveError, match=said):
        shared_by(replace(plain, function=in_blocks), [asked(degree, "gather")])


@each_case("fault", FAULTS)
def test_a_fault_gives_wrong_numbers(fault: str) -> None:
    case = layer(16)
    with FAULTS[fault]():
        assert shared(case, 4, "ring").error > 1e-3
