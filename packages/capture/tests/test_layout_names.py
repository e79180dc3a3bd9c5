"""Indexes have the names that people give them, and a user finds an index by its name or by a parameter's dimension."""

from __future__ import annotations

import pytest

from packages.capture.tests.layout_graphs import Graph, chunk_of, spelled
from piper_capture.layouts import NamedIndexes
from piper_capture.layouts.indexes import LoopIndex
from tests.helpers.cases import each_case


def named(graph: Graph) -> NamedIndexes:
    return NamedIndexes.of(graph.joint, [(name,) for name in graph.names])


def at(found: NamedIndexes, name: str) -> set[str]:
    """The dimensions of parameters that indexes of a name are in."""
    indexes = [i for i, known in found.names.items() if known == name]
    return {spot for i in indexes for spot in found.spots.get(i, ())}


def names_at(found: NamedIndexes, param: str, dim: int) -> list[str]:
    index: tuple[LoopIndex, ...] = found.dims(
        next(k for k, names in enumerate(found.params) if param in names)
    )[dim]
    return [found.names[i] for i in index]


@pytest.mark.long
def test_a_llama() -> None:
    layer = named(chunk_of("llama", "layer0"))
    assert at(layer, "heads") == {"q:0", "k:0", "v:0", "out:1"}
    assert at(layer, "groups") == {"q:0", "out:1"}
    assert at(layer, "hidden") == {"gate:0", "up:0", "down:1"}
    assert names_at(layer, "v", 0) == ["heads", "head_dim"]
    assert {"rows", "tokens", "width"} <= set(layer.names.values())
    assert names_at(layer, "norm1", 0) == names_at(layer, "out", 0) == ["width"]
    assert not [name for name in layer.names.values() if ":" in name]


def test_a_gpt() -> None:
    layer = named(chunk_of("gpt", "layer0"))
    assert at(layer, "heads") == {"qkv:0", "qkv.bias:0", "out:1"} and at(layer, "hidden") == {
        "up:0",
        "up.bias:0",
        "down:1",
    }
    assert names_at(layer, "qkv", 0) == ["qkv:0", "heads", "head_dim"], (
        "which of the three has no name of its own"
    )


@pytest.mark.long
def test_ends() -> None:
    """A table of positions is looked up by numbers that the chunk makes: its rows are no vocabulary."""
    embedding, head, gpt = (
        named(chunk_of(*c)) for c in (("llama", "root"), ("llama", "root.1"), ("gpt", "root"))
    )
    assert at(embedding, "vocab") == {"embed:0"} and at(head, "vocab") == {"head:0"}
    assert at(gpt, "vocab") == {"embed:0"} and names_at(gpt, "position", 0) == ["position:0"]


@pytest.mark.long
def test_a_mixture_of_experts() -> None:
    layer = named(chunk_of("moe", "layer0"))
    parts = {f"feed_forward.{name}" for name in ("gate", "up", "down")}
    assert {f"{name}:0" for name in parts} <= at(layer, "experts")
    assert at(layer, "hidden") == {
        "feed_forward.gate:2",
        "feed_forward.up:2",
        "feed_forward.down:1",
    }


@pytest.mark.long
@each_case(
    ("spelling", "name", "where"),
    [
        ("repeated", "heads", {"q:1", "k:1", "v:1", "out:0"}),
        ("repeated", "groups", {"q:1", "out:0"}),
        ("interleaved", "heads", {"qkv:1", "out:0"}),
        ("alibi", "heads", {"qkv:1", "out:0", "slope:0"}),
        ("buckets", "heads", {"q:1", "k:1", "v:1", "out:0", "table:1"}),
        ("gated", "hidden", {"both:1", "down:0"}),
        ("one key", "hidden", {"q:1", "k:1", "v:1", "out:0"}),
    ],
)
def test_attention_that_is_written_out(spelling: str, name: str, where: set[str]) -> None:
    """Heads are what products are made for one by one; those that share one key, and their elements, are hidden."""
    assert at(named(spelled(spelling)), name) == where


def test_what_has_no_name_is_a_parameters() -> None:
    assert names_at(named(spelled("buckets")), "table", 0) == ["table:0"]


def test_why_devices_cannot_share() -> None:
    layer = named(spelled("uneven"))
    refused = list(layer.refusals("all_of_it:1", 2))
    assert refused and all(
        "split_with_sizes" in text and "(parameters all_of_it:1" in text for text in refused
    )
    assert list(named(spelled("gated")).refusals("hidden", 4)) == [
        "4 devices cannot share 14 evenly; 2 can"
    ]
    assert list(named(spelled("gated")).refusals("hidden", 7)) == []
