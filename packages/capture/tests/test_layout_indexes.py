"""The indexes of real joint graphs: heads, hidden, vocab and experts are found by themselves, whatever way a layer is
written."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from packages.capture.tests.layout_graphs import (
    HEADS,
    HIDDEN,
    KV,
    SPELLINGS,
    E,
    Graph,
    chunk_of,
    spelled,
)
from packages.capture.tests.test_layout_rules import CASES
from piper_capture.layouts.indexes import LoopIndex, OverlappingCuts, indexed
from tests.helpers.cases import each_case
from tests.helpers.models import CASES as CAPTURED
from tests.helpers.models import MORE, captured

CHUNKS = [("llama", "layer0"), ("llama", "root"), ("llama", "root.1"), ("gpt", "layer0")]
LOSS = {"piper.cross_entropy.default", "piper.cross_entropy_dgrad.default"}
ADDED = {"aten.addmm.default"}
"""Products with a bias, whose inner dimension is whole: each term of a sum would add the bias again."""


def index(graph: Graph, name: str, dim: int, place: int = 0) -> LoopIndex:
    return graph.dims(name)[dim][place]


def test_a_llama_has_heads_groups_and_hidden() -> None:
    layer = chunk_of("llama", "layer0")
    heads, groups, *_ = layer.dims("q")[0]
    assert layer.sizes("q")[0] == [2, 2, 2, 2], (
        "heads of keys, queries of each, and head_dim in the halves that positions rotate"
    )
    assert layer.sizes("v")[0] == [2, 4]
    assert index(layer, "k", 0) == index(layer, "v", 0) == index(layer, "out", 1) == heads
    assert index(layer, "out", 1, 1) == groups
    hidden = index(layer, "down", 1)
    assert layer.dims("gate")[0] == layer.dims("up")[0] == layer.dims("down")[1] == (hidden,)
    assert layer.blockers(heads) == layer.blockers(groups) == layer.blockers(hidden) == set()


def test_a_llama_has_rows_tokens_and_width() -> None:
    layer = chunk_of("llama", "layer0")
    rows, tokens, width = (dim[0] for dim in layer.dims("root:out0"))
    assert [i.size for i in (rows, tokens, width)] == [3, 8, 16]
    assert layer.blockers(rows) == set()
    assert layer.blockers(tokens) == {"piper.attention.default", "piper.attention_dgrad.default"}
    assert layer.blockers(width) == {"piper.rms_norm.default", "piper.rms_norm_dgrad.default"}
    assert index(layer, "cos", 0) == index(layer, "sin", 0) == tokens
    assert (
        index(layer, "norm1", 0)
        == index(layer, "q", 1)
        == index(layer, "out", 0)
        == index(layer, "down", 0)
        == width
    )


def test_a_gpt_has_three_of_each_head_in_its_projection() -> None:
    layer = chunk_of("gpt", "layer0")
    assert layer.sizes("qkv")[0] == layer.sizes("qkv.bias")[0] == [3, 2, 8]
    heads, hidden = index(layer, "qkv", 0, 1), index(layer, "up", 0)
    assert (
        layer.sizes("out")[1] == [2, 8]
        and index(layer, "out", 1) == index(layer, "qkv.bias", 0, 1) == heads
    )
    assert layer.dims("up.bias")[0] == layer.dims("down")[1] == (hidden,)
    assert layer.blockers(heads) <= ADDED and layer.blockers(hidden) <= ADDED
    assert layer.unknown() == set()


def test_ends_have_a_vocabulary() -> None:
    embedding, head = chunk_of("llama", "root"), chunk_of("llama", "root.1")
    assert embedding.blockers(index(embedding, "embed", 0)) == {
        "aten.embedding.default", "aten.embedding_dense_backward.default",
    }  # fmt: skip
    assert embedding.blockers(index(embedding, "embed", 1)) == set()
    assert head.blockers(index(head, "head", 0)) == LOSS
    assert head.dims("targets") == head.dims("layer1:out0")[:2]


@pytest.mark.long
def test_a_mixture_has_experts_and_their_hidden() -> None:
    layer = chunk_of("moe", "layer0")
    experts, hidden = (index(layer, "feed_forward.gate", d) for d in (0, 2))
    assert layer.dims("feed_forward.up") == layer.dims("feed_forward.gate")
    assert (index(layer, "feed_forward.down", 0), index(layer, "feed_forward.down", 1)) == (
        experts,
        hidden,
    )
    assert layer.blockers(experts) == {
        "aten.gather.default",
        "aten.scatter_add.default",
        "aten.slice.Tensor",
    }
    assert layer.blockers(hidden) == set()
    assert layer.blockers(index(layer, "root:out0", 0)) == set()
    assert layer.unknown() == set()


@each_case(
    ("name", "weight", "sizes", "place", "others"),
    [
        ("repeated", "q", [KV, HEADS // KV, E], 0, ("k", "v", "out")),
        ("one key", "q", [HEADS, E], 0, ("out",)),
        ("interleaved", "qkv", [HEADS, 3, E], 0, ("out",)),
        ("alibi", "qkv", [3, HEADS, E], 1, ("out", "slope")),
        ("buckets", "q", [HEADS, E], 0, ("k", "v", "out", "table")),
        ("gated", "both", [2, HIDDEN], 1, ("down",)),
        ("normed", "q", [HEADS, E], 0, ("out",)),
    ],
)
def test_a_layer_in_other_words(
    name: str, weight: str, sizes: list[int], place: int, others: tuple[str, ...]
) -> None:
    layer = spelled(name)
    assert layer.sizes(weight)[1] == sizes
    shared = index(layer, weight, 1, place)
    assert layer.blockers(shared) == set()
    assert all(any(shared in dim for dim in layer.dims(other)) for other in others)
    assert layer.blockers(index(layer, "x", 0)) == set()
    assert layer.unknown() == set()


def test_queries_of_one_group_are_an_index_of_their_own() -> None:
    layer = spelled("repeated")
    groups = index(layer, "q", 1, 1)
    assert layer.blockers(groups) == set()
    assert not any(groups in dim for name in ("k", "v") for dim in layer.dims(name))


def test_parts_of_unequal_sizes_stay_whole() -> None:
    layer = spelled("uneven")
    assert layer.blockers(index(layer, "all_of_it", 1)) == {
        "aten.split_with_sizes.default",
        "aten.cat.default",
    }


def ops_of(graphs: Iterable[Graph]) -> set[str]:
    return {str(op.call.op) for graph in graphs for op in graph.indexes.ops.values()}


JUDGED = {str(given.op) for given in CASES.values()}


def test_every_op_of_these_graphs_is_judged() -> None:
    met = ops_of([*(chunk_of(*c) for c in CHUNKS), *map(spelled, SPELLINGS)])
    assert len(met) > 40
    assert met <= JUDGED


@pytest.mark.long
@pytest.mark.parametrize("name", [*CAPTURED, *MORE])
def test_every_op_of_the_suites_models_is_judged_or_unknown(name: str) -> None:
    chunks = {c.code: c.id for c in captured(name).program.chunks if not c.opaque}
    graphs = [chunk_of(name, chunk) for chunk in chunks.values()]
    unknown = {
        "aten.native_dropout.default",
        "piper_tests.soft_clip.default",
        "piper_tests.soft_clip_backward.default",
    }
    assert ops_of(graphs) - JUDGED <= unknown
    assert set().union(*(graph.unknown() for graph in graphs)) <= unknown


def test_cuts_that_do_not_fit_into_each_other_are_said() -> None:
    """Of 16 elements, blocks of 6 are no whole number of blocks of 4."""
    joint = captured("llama").code.joint(captured("llama").program.chunks[0].code, 3)
    embed = next(n for k, n in enumerate(joint.inputs) if joint.kinds[k] == "param")
    with pytest.raises(OverlappingCuts):
        indexed(joint, {((embed, 0), 1): {4, 6}})
