"""Embeddings, output heads and losses that devices have in parts of the vocabulary: all of them together make what one
makes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from packages.capture.tests.joint_harness import Case
from packages.capture.tests.lockstep import judge, shared_of
from piper_capture.layouts import Agreed, conversions
from piper_capture.layouts.decide import PARTIAL
from piper_ops import all_gather
from piper_ops.ground.library import OP_KERNELS
from piper_ops.pointwise import vocabulary
from tests.helpers.cases import each_case

ROWS, TOKENS, WIDTH, VOCABULARY, IGNORED = 2, 8, 6, 24, 5
PADDING = 11
"""One of the numbers that are looked up, twice."""
EXACT = 1e-12


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def numbers(below: int = VOCABULARY) -> Tensor:
    return torch.randint(below, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))


def targets() -> Tensor:
    found = numbers()
    found[:, ::3] = IGNORED
    return found


@cache
def head(reduction: str, bias: bool, vocabulary: int = VOCABULARY) -> Case:
    """A norm, an output head and a cross-entropy, as the last chunk of a model."""

    def function(x: Tensor, norm: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
        *biases, target = rest
        logits = F.linear(F.rms_norm(x, (WIDTH,), norm), weight, *biases).flatten(0, 1)
        loss = F.cross_entropy(logits, target.flatten(), reduction=reduction, ignore_index=IGNORED)
        return (loss * loss).sum()

    given = (
        drawn(ROWS, TOKENS, WIDTH),
        drawn(WIDTH),
        drawn(vocabulary, WIDTH),
        *([drawn(vocabulary)] if bias else []),
        targets(),
    )
    kinds = ("value", "param", "param", *(["param"] if bias else []), "batch")
    return Case(function, kinds, given, portable=True)


@cache
def table(padding: int | None, places: bool, vocabulary: int = VOCABULARY) -> Case:
    """An embedding, with one of places beside it where `places`, as the first chunk of a model."""

    def function(tokens: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
        found = F.embedding(tokens, weight, padding_idx=padding)
        return found + F.embedding(torch.arange(TOKENS), *rest) if places else found

    given = (
        numbers(vocabulary),
        drawn(vocabulary, WIDTH),
        *([drawn(TOKENS, WIDTH)] if places else []),
    )
    return Case(function, ("batch", "param", "param")[: len(given)], given)


@cache
def tied() -> Case:
    """A model in one chunk whose embedding is its output head."""

    def function(tokens: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = torch.tanh(F.embedding(tokens, weight)) @ weight.t()
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)

    return Case(
        function,
        ("batch", "param", "batch"),
        (numbers(), drawn(VOCABULARY, WIDTH), targets()),
        portable=True,
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_head_and_its_loss(reduction: str, bias: bool, degree: int, stream: bool) -> None:
    found = judge(head(reduction, bias), degree, stream=stream)
    assert found.error < EXACT
    parts = [bool(found.shared.layout_of(k)) for k in range(3 + bias)]
    assert parts == [stream, False, True, *([True] if bias else [])], (
        "the input and its gradient are parts of the stream"
    )
    assert found.forward == {"all_gather": 2 if stream else 1}, (
        "two numbers per token, and the tokens of the stream"
    )
    assert found.backward == (
        {"reduce_scatter": 1, "all_gather": 1} if stream else {"all_reduce": 1}
    )


@each_case("stream", [False, True])
@each_case("degree", [2, 4])
@each_case("padding", [None, PADDING])
@each_case("places", [False, True])
def test_an_embedding(places: bool, padding: int | None, degree: int, stream: bool) -> None:
    assert padding is None or (numbers() == padding).any()
    found = judge(table(padding, places), degree, stream=stream)
    assert found.error < EXACT
    assert all(found.shared.layout_of(k) for k in range(1, 2 + places))
    assert found.forward == {"reduce_scatter" if stream else "all_reduce": 1}, (
        "both embeddings are terms of one sum"
    )
    assert found.backward["all_gather"] == (1 + places if stream else 0)
    assert not found.backward.keys() - {"all_gather"}


@each_case("stream", [False, True])
@each_case("degree", [2, 4])
def test_an_embedding_that_is_the_head_of_the_same_chunk(degree: int, stream: bool) -> None:
    """The gradient of its rows is not made whole to be cut into parts then."""
    found = judge(tied(), degree, stream=stream)
    assert found.error < EXACT
    made = [
        n.meta["val"].shape
        for n in found.shared.joint.graph.nodes
        if n.target is vocabulary.embedding_part_dgrad
    ]
    assert made == [(VOCABULARY // degree, WIDTH)]


@pytest.mark.parametrize("degree", [2, (2, 2)])
def test_two_numbers_per_token_are_all_that_a_loss_sends(degree: Any) -> None:
    """Also where the axis is split, for heads of keys that are fewer than devices."""
    found = judge(head("mean", False), degree)
    assert found.error < EXACT and found.forward == {"all_gather": 1}
    (sent,) = [n for n in found.shared.joint.graph.nodes if n.target is all_gather]
    assert sent.meta["val"].shape == (2 if degree == 2 else 4, vocabulary.STATISTICS, ROWS * TOKENS)
    names = [axis.name for axis in found.shared.axes]
    assert [(p.axis, p.dim, p.outer) for p in found.shared.layout_of(2)] == [
        (name, 0, 1) for name in names
    ]


def test_an_embedding_along_a_split_axis() -> None:
    found = judge(table(PADDING, True), (2, 2))
    assert found.error < EXACT and found.forward == {"all_reduce": 1}


@each_case(("size", "nearest"), [(25, 5), (29, 29), (26, 2)])
def test_a_vocabulary_that_does_not_divide_stays_whole_and_says_so(size: int, nearest: int) -> None:
    found, made = shared_of(table(None, False, size), 4)
    assert not made.layout_of(1)
    (only,) = found.unshared
    assert (only.input, only.dim, only.size) == (1, 0, size)
    assert only.why == f"4 devices cannot share {size} evenly; {nearest} can"
    assert judge(table(None, False, size), 4, stream=True).error < EXACT


def test_parameters_stay_whole_and_gradients_are_sums_where_other_chunks_need_it() -> None:
    for stream in (False, True):
        whole = judge(head("mean", True), 2, stream=stream, agreed=Agreed(whole=frozenset({2})))
        assert whole.error < EXACT
        assert not whole.shared.layout_of(2) and not whole.shared.layout_of(3), (
            "the bias has the same index"
        )
    places = frozenset({2})
    alone = judge(table(None, True), 2, agreed=Agreed(whole=places))
    terms = judge(table(None, True), 2, agreed=Agreed(whole=places, partial_grads=places))
    assert (alone.shared.grads[2], terms.shared.grads[2]) == ((None,), (PARTIAL,))
    assert max(alone.error, terms.error) < EXACT


def test_terms_of_all_devices_at_once_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversions, "_first", lambda emit, source, axis: source)
    places = frozenset({2})
    assert (
        judge(table(None, True), 2, agreed=Agreed(whole=places, partial_grads=places)).error > 0.5
    )


def no_mask(weight: Tensor, indices: Tensor, place: Any, degree: Any, rest: Any) -> Tensor:
    local, _ = vocabulary.VocabularyPart(weight.shape[0], place, degree, rest).own(indices)
    return F.embedding(local, weight)


def logit_of_another(
    logits: Tensor, target: Tensor, place: Any, degree: Any, rest: Any, **options: Any
) -> Tensor:
    made = OP_KERNELS[vocabulary.cross_entropy_part](logits, target, place, degree, rest, **options)
    made[1] = logits.gather(1, (target % logits.shape[1]).unsqueeze(1)).squeeze(1)
    return made


def sum_of_one_part(statistics: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    one = statistics.clone()
    one[1:, 0] = -torch.inf
    return OP_KERNELS[vocabulary.cross_entropy_joined](one, target, **options)


@each_case(
    ("case", "op", "kernel"),
    [
        (table(None, False), vocabulary.embedding_part, no_mask),
        (head("mean", False), vocabulary.cross_entropy_part, logit_of_another),
        (head("mean", False), vocabulary.cross_entropy_joined, sum_of_one_part),
    ],
    ids=[
        "a mask forgotten",
        "the logit of another device's class",
        "the logsumexp of one part only",
    ],
)
def test_the_judge_sees_a_wrong_part(case: Case, op: Any, kernel: Any) -> None:
    assert judge(case, 2, instead={op: kernel}).error > 1e-3
