"""The ops on parts of a vocabulary: what all devices make is what one device makes of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import piper_ops
from piper_ops import cuda_workspace, kernel_of, peak_bytes_inside
from piper_ops.ground.library import OP_KERNELS
from piper_ops.pointwise import losses
from tests.helpers.cases import each_case

SIZE, WIDTH, TOKENS, IGNORED = 24, 5, 40, 7
aten = torch.ops.aten


@dataclass(frozen=True)
class Split:
    """A vocabulary of `sizes` factors, of which devices share those in `shared`, an axis each in this order."""

    sizes: tuple[int, ...]
    shared: tuple[int, ...]

    @property
    def places(self) -> Iterator[tuple[int, ...]]:
        yield from product(*(range(self.sizes[k]) for k in self.shared))

    @property
    def degree(self) -> list[int]:
        return [self.sizes[k] for k in self.shared]

    @property
    def rest(self) -> list[int]:
        done = [self.shared[:n] for n in range(len(self.shared))]
        return [
            prod(s for j, s in enumerate(self.sizes) if j > k and j not in gone)
            for k, gone in zip(self.shared, done)
        ]

    def own(self, whole: Tensor, dim: int, place: tuple[int, ...]) -> Tensor:
        """Takes a device's part of a tensor, by indexing alone."""
        factors = torch.arange(prod(self.sizes)).view(self.sizes)
        at: list[Any] = [slice(None)] * len(self.sizes)
        for k, p in zip(self.shared, place, strict=True):
            at[k] = p
        return whole.index_select(dim, factors[tuple(at)].reshape(-1))


SPLITS = {
    "halves": Split((2, 12), (0,)),
    "quarters": Split((4, 6), (0,)),
    "rows each": Split((24,), (0,)),
    "two tables": Split((2, 3, 4), (1,)),
    "two axes": Split((2, 2, 6), (0, 1)),
    "two axes the other way round": Split((2, 3, 4), (1, 0)),
}


each_split = each_case("split", SPLITS.values(), ids=[*SPLITS])


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def numbers(*shape: int) -> Tensor:
    return torch.randint(0, SIZE, shape)


def joined(
    split: Split, logits: Tensor, target: Tensor, reduction: str, ignore: int
) -> list[Tensor]:
    """The loss and the logsumexp, from the numbers that the devices gather."""
    parts = [
        piper_ops.cross_entropy_part(
            split.own(logits, 1, p), target, p, split.degree, split.rest, ignore
        )
        for p in split.places
    ]
    return list(piper_ops.cross_entropy_joined(torch.stack(parts), target, reduction, ignore))


@each_split
def test_what_all_devices_look_up_adds_up_to_the_rows(split: Split) -> None:
    weight, indices = drawn(SIZE, WIDTH), numbers(3, TOKENS)
    found = [
        piper_ops.embedding_part(split.own(weight, 0, p), indices, p, split.degree, split.rest)
        for p in split.places
    ]
    assert torch.equal(sum(found[1:], found[0]), F.embedding(indices, weight))
    assert sum(int((f != 0).any(-1).sum()) for f in found) == indices.numel()


@each_split
@each_case("padding", [-1, 0, 13])
def test_the_gradient_of_the_own_rows_is_a_part_of_the_tables(split: Split, padding: int) -> None:
    grad, indices = drawn(3, TOKENS, WIDTH), numbers(3, TOKENS)
    whole = aten.embedding_dense_backward(grad, indices, SIZE, padding, False)
    for p in split.places:
        wanted = split.own(whole, 0, p)
        given = grad, indices, wanted.shape[0], p, split.degree, split.rest, padding
        torch.testing.assert_close(
            piper_ops.embedding_part_dgrad(*given), wanted, rtol=1e-14, atol=1e-14
        )


@each_split
@each_case("ignore", [-100, IGNORED])
@each_case("reduction", ["mean", "sum", "none"])
def test_a_loss_over_parts_is_that_over_all_classes(
    split: Split, reduction: str, ignore: int
) -> None:
    logits, target = drawn(TOKENS, SIZE) * 5, numbers(TOKENS)
    target[::3] = ignore
    loss, lse = joined(split, logits, target, reduction, ignore)
    wanted, over_all = piper_ops.cross_entropy(logits, target, reduction, ignore)
    torch.testing.assert_close((loss, lse), (wanted, over_all), rtol=1e-13, atol=1e-13)
    grad_loss = drawn(*loss.shape)
    whole = piper_ops.cross_entropy_dgrad(grad_loss, logits, target, lse, reduction, ignore)
    for p in split.places:
        given = (
            grad_loss,
            split.own(logits, 1, p),
            target,
            lse,
            p,
            split.degree,
            split.rest,
            reduction,
            ignore,
        )
        torch.testing.assert_close(
            piper_ops.cross_entropy_part_dgrad(*given),
            split.own(whole, 1, p),
            rtol=1e-12,
            atol=1e-14,
        )


@each_case("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_loss_in_half_precision_is_computed_in_single(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(losses.SLICE_ELEMENTS, "cpu", 7 * SIZE)
    split, exact, target = SPLITS["halves"], drawn(TOKENS, SIZE), numbers(TOKENS)
    logits = exact.to(dtype)
    loss, lse = joined(split, logits, target, "mean", -100)
    assert loss.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(
        loss.double(), F.cross_entropy(logits.double(), target), rtol=1e-5, atol=1e-6
    )
    whole = piper_ops.cross_entropy_dgrad(torch.ones(()), logits, target, lse)
    for p in split.places:
        given = torch.ones(()), split.own(logits, 1, p), target, lse, p, split.degree, split.rest
        torch.testing.assert_close(
            piper_ops.cross_entropy_part_dgrad(*given), split.own(whole, 1, p)
        )


def test_classes_of_no_weight_make_no_difference() -> None:
    """All of a device's logits may be -inf, as those that a mask or a padded table leaves out."""
    split, logits, target = SPLITS["halves"], drawn(TOKENS, SIZE), numbers(TOKENS) % 12
    logits[:, 12:] = -torch.inf
    loss, lse = joined(split, logits, target, "mean", -100)
    torch.testing.assert_close(loss, F.cross_entropy(logits, target), rtol=1e-13, atol=1e-13)
    given = (
        torch.ones((), dtype=torch.float64),
        logits[:, 12:].contiguous(),
        target,
        lse,
        (1,),
        split.degree,
        split.rest,
    )
    assert not piper_ops.cross_entropy_part_dgrad(*given).any()


def test_ignored_targets_only_give_what_torch_gives() -> None:
    split, logits, target = SPLITS["halves"], drawn(4, SIZE), torch.full((4,), -100)
    assert joined(split, logits, target, "mean", -100)[0].isnan()
    assert not joined(split, logits, target, "sum", -100)[0]


@each_case("wrong", [-1, SIZE])
def test_a_number_outside_of_the_vocabulary_is_refused_by_every_device(wrong: int) -> None:
    split, number = SPLITS["halves"], torch.tensor([1, wrong])
    for p in split.places:
        at = p, split.degree, split.rest
        for call in (
            lambda at=at: piper_ops.embedding_part(drawn(12, WIDTH), number, *at),
            lambda at=at: piper_ops.embedding_part_dgrad(drawn(2, WIDTH), number, 12, *at),
            lambda at=at: piper_ops.cross_entropy_part(drawn(2, 12), number, *at),
        ):
            with pytest.raises(IndexError, match="the vocabulary has 24 numbers"):
                call()


def calls(
    dtype: torch.dtype, size: int = SIZE, reduction: str = "mean"
) -> dict[str, tuple[Any, ...]]:
    """Arguments of each op, on the first of two devices with `size` numbers each."""
    logits, target, at = drawn(TOKENS, size, dtype=dtype), numbers(TOKENS), ([0], [2], [size])
    lse = torch.zeros(TOKENS, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return {
        "embedding_part": (drawn(size, WIDTH, dtype=dtype), target, *at),
        "embedding_part_dgrad": (drawn(TOKENS, WIDTH, dtype=dtype), target, size, *at),
        "cross_entropy_part": (logits, target, *at),
        "cross_entropy_joined": (
            torch.stack([lse, lse]).expand(2, 2, TOKENS).contiguous(),
            target,
            reduction,
        ),
        "cross_entropy_part_dgrad": (lse.sum(), logits, target, lse, *at, reduction),
    }


NAMES = tuple(calls(torch.float32))


@each_case("dtype", [torch.bfloat16, torch.float64])
@each_case("name", NAMES)
def test_fake_results_are_like_real_ones(name: str, dtype: torch.dtype) -> None:
    torch.library.opcheck(
        getattr(piper_ops, name), calls(dtype)[name], test_utils=("test_schema", "test_faketensor")
    )


@each_case("slices", [1, 4])
@each_case("reduction", ["mean", "sum", "none"])
@each_case("dtype", [torch.float64, torch.float32, torch.bfloat16])
@each_case("name", NAMES)
def test_kernels_hold_what_their_formulas_say(
    name: str, dtype: torch.dtype, reduction: str, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 10 * SIZE
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(losses.SLICE_ELEMENTS, device, TOKENS * size // slices)
    op, args = getattr(piper_ops, name), calls(dtype, size, reduction)[name]
    if name == "cross_entropy_part_dgrad" and reduction == "none":
        args = (args[3], *args[1:])
    workspace = cuda_workspace(op, args, op(*args))
    assert workspace is not None
    assert workspace.bytes == peak_bytes_inside(OP_KERNELS[op], *args)


def test_costs_by_hand() -> None:
    ops = {name: (getattr(piper_ops, name), args) for name, args in calls(torch.float32).items()}
    item, found = 4, {name: kernel_of(op, args, op(*args)) for name, (op, args) in ops.items()}
    part, dgrad = found["cross_entropy_part"], found["cross_entropy_part_dgrad"]
    assert (part.kind, part.dims, part.flops) == ("loss", (TOKENS, SIZE), 4 * TOKENS * SIZE)
    assert part.bytes == item * TOKENS * SIZE + 8 * TOKENS + 2 * item * TOKENS
    assert (dgrad.kind, dgrad.dims, dgrad.flops) == ("loss", (TOKENS, SIZE), 3 * TOKENS * SIZE)
    assert (found["cross_entropy_joined"].kind, found["cross_entropy_joined"].flops) == (
        "loss",
        4 * 4 * TOKENS,
    )
    looked, table = found["embedding_part"], found["embedding_part_dgrad"]
    assert (looked.kind, looked.flops, looked.bytes) == (
        "embedding",
        0,
        8 * TOKENS + 2 * item * TOKENS * WIDTH,
    )
    assert (table.kind, table.flops) == ("embedding", TOKENS * WIDTH)
    assert table.bytes == 8 * TOKENS + 2 * item * TOKENS * WIDTH + item * SIZE * WIDTH
