"""`piper explain` says what devices can share of a model and what they do; `shard(index=...)` shares what is named."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import piper
from piper import Mesh
from piper.api.compiling.compiling import Compiled
from piper.api.reference.verification import verify_strategy
from piper.views.explained.explain import facts
from piper.views.explained.layouts import layouts
from piper_compiler import Strategy
from piper_ir.ground.errors import DirectiveError
from piper_ir.program.layout import DimPart
from tests.helpers import published_llama, shared_jobs
from tests.helpers.cases import each_case
from tests.helpers.models import feature_batch, squared_error
from tests.helpers.source_tree import ROOT
from tests.predictions.test_explain import Products

PLACE = re.compile(r" \([\w.]+\.py:.*")
"""The place of an op, and what comes after it."""


@cache
def published(tp: int = 1, stream: str = "") -> Compiled:
    directives = [piper.shard(piper.where(), stream=stream)] if tp > 1 else []
    return piper.compile(published_llama.job(), Strategy(Mesh(tp=tp), directives))


def logical(text: str) -> Iterator[str]:
    """Yield the lines of an explanation, those that were too long in one piece again, without places."""
    line = ""
    for part in text.splitlines():
        if part.startswith(" " * 10):
            line += f" {part.strip()}"
            continue
        yield PLACE.sub("", line)
        line = part
    yield PLACE.sub("", line)


def documented() -> tuple[str, str]:
    """Return the beginning and the end of the explanation that docs/shard.md shows."""
    text = (ROOT / "docs" / "shard.md").read_text()
    shown = text[text.index("```\n  layer0, layer1") + 4 :].split("```")[0]
    head, tail = shown.split("      ...\n")
    assert "modeling_llama.py" in head and tail.startswith("      gradients summed")
    return head.rstrip(), tail.rstrip()


@pytest.mark.long
def test_the_document_shows_what_is_printed() -> None:
    """The spelling here is that of the library; where it stands in a file is not."""
    printed = layouts(published(2, "tokens"))
    made = printed[printed.index("  layer0, layer1") : printed.index("  root.1")]
    assert "published_llama.py" in made
    lines = list(logical(made.rstrip()))
    head, tail = (list(logical(part)) for part in documented())
    assert lines[: len(head)] == head and lines[-1:] == tail[1:]


def test_the_example_is_what_the_document_shows() -> None:
    """The same with the library, where it is installed: to the letter but for the numbers of its lines."""
    pytest.importorskip("transformers")
    from piper.cli.loading import load_file

    loaded = load_file(ROOT / "examples" / "hugging_face_llama.py")
    printed = layouts(piper.compile(loaded.job, loaded.strategy))
    made = printed[printed.index("  layer0, layer1") : printed.index("  root.1")]
    text, head, tail = (re.sub(r"py:\d+", "", part) for part in (made.rstrip(), *documented()))
    assert text.startswith(head) and text.endswith(tail)


@pytest.mark.long
@pytest.mark.parametrize("tp", [2, 4])
def test_masks_and_positions_that_all_layers_share(tp: int) -> None:
    """A mask has tokens twice: it passes from layer to layer whole."""
    strategy = Strategy(Mesh(tp=tp), [piper.shard(piper.where(), stream="tokens")])
    report = verify_strategy(published_llama.job(), strategy, steps=1)
    assert report.equal, report.text()


@pytest.mark.long
def test_a_mask_stays_whole() -> None:
    layer = next(c for c in published(2, "tokens").program.chunks if c.id == "layer0")
    shapes = {tuple(i.spec.shape[1:]) for i in layer.inputs if i.kind == "value"}
    assert shapes == {(8, 64), (16, 8), (1, 16, 16)}


def test_without_shard_the_indexes_are_a_line_for_each_kind_of_chunk() -> None:
    assert layouts(published()).splitlines() == [
        "indexes, which devices can share by `shard`",
        "  root: vocab 128",
        "  layer0, layer1: heads 2, groups 4, hidden 96",
        "  root.1: vocab 128",
    ]


def test_facts_name_indexes() -> None:
    found = facts(published(2, "tokens"))["indexes"]
    layer = {i["name"]: i for i in found[1]["indexes"]}
    assert (
        found[1]["chunks"] == ["layer0", "layer1"]
        and layer["heads"]["size"] == [2]
        and layer["heads"]["shared"] == 2
    )
    assert layer["width"]["obstacle"] and layer["width"]["shared"] == 1


def test_an_op_without_a_rule_is_named() -> None:
    job = piper.Job(Products, feature_batch, squared_error, shared_jobs.adamw, global_batch=4)
    short = layouts(piper.compile(job, Strategy(Mesh(), [])))
    assert "ops without a rule: product (test_explain.py:" in short
    found = " ".join(
        layouts(piper.compile(job, Strategy(Mesh(tp=2), [piper.shard(piper.where())]))).split()
    )
    assert "computed whole, without a rule: product (test_explain.py:" in found
    assert "100.0% of them whole" in found and "has no rule: it is computed whole" in found


def asked(name: str, tp: int, index: Sequence[str], stream: str = "") -> Compiled:
    job = shared_jobs.job(name)
    return piper.compile(
        job, Strategy(Mesh(tp=tp), [piper.shard(piper.where(), index=tuple(index), stream=stream)])
    )


def shared_params(made: Compiled) -> set[str]:
    return {re.sub(r"\d+", "*", p.name) for p in made.plan.params if p.layout}


ATTENTION = {f"layers.*.attention.{name}.weight" for name in ("q", "k", "v", "out")}
HIDDEN = {f"layers.*.feed_forward.{name}.weight" for name in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("index", "shared"),
    [
        (["heads"], ATTENTION),
        (["layers.*.feed_forward.up.weight:0"], HIDDEN),
        pytest.param(["heads", "hidden"], ATTENTION | HIDDEN, marks=pytest.mark.long),
        pytest.param(["vocab"], {"tokens.weight", "head.weight"}, marks=pytest.mark.long),
    ],
)
def test_only_what_is_named_is_shared(index: list[str], shared: set[str]) -> None:
    made = asked("llama", 2, index)
    assert shared_params(made) == shared
    assert "not asked for" in layouts(made)


def test_groups_alone() -> None:
    """What stands inside of an index is shared by itself where it alone is named."""
    made = asked("llama", 2, ["groups"])
    layout = {p.name: p.layout for p in made.plan.params}
    assert layout["layers.0.attention.q.weight"] == (DimPart("tp", 0, outer=4),)
    assert layout["layers.0.attention.k.weight"] == ()


def test_named_indexes_are_one_device() -> None:
    made = asked("llama", 2, ["hidden"])
    shared_jobs.assert_equal("llama", made, shared_jobs.run(made))


@each_case(
    ("tp", "index", "message"),
    [
        (
            2,
            "headz",
            "index='headz'.: there is no such index; there is vocab, heads, hidden; a dimension of a parameter",
        ),
        (2, "layers.9.up:0", "there is no such index"),
        (3, "hidden", None),
        (5, "hidden", "devices cannot share it in layer0: 5 devices cannot share 48 evenly; 4 can"),
        (
            2,
            "head_dim",
            r"in layer0: split \(parts.py:\d+: a, b = x.chunk.* wants it whole \(parameters "
            r"layers.0.attention.q",
        ),
        (2, "width", "it passes between chunks"),
    ],
)
def test_what_cannot_be_shared_is_refused(tp: int, index: str, message: str | None) -> None:
    if message is None:
        assert shared_params(asked("llama", tp, [index])) == HIDDEN
        return
    with pytest.raises(DirectiveError, match=message):
        asked("llama", tp, [index])


def whys(made: Any) -> dict[str, list[str]]:
    return {
        c.id: [x.why for sig in c.steps.values() for x in sig.collectives] for c in made.plan.chunks
    }


def test_collectives_say_why() -> None:
    """The words are the same in all layers that share their code, and name no folder of this machine."""
    found = whys(shared_jobs.compiled("llama", Mesh(tp=2), [], stream="tokens"))
    assert found["layer0"] == found["layer3"]
    first, second, *_ = found["layer0"]
    assert re.fullmatch(r"before mm \(decoder_attention.py:\d+: .* = self.q\(x\).*\)", first)
    assert re.fullmatch(r"after mm \(decoder_attention.py:\d+: return self.out\(.*\)", second)
    assert any(re.match(r"in cross_entropy \(jobs.py:\d+: ", why) for why in found["root.1"])
    assert all(why and "/" not in why.split(":")[0] for each in found.values() for why in each)


def test_the_number_of_a_line_is_no_part_of_a_key() -> None:
    """A comment above a line makes no other plan; another message does."""
    made = shared_jobs.compiled("llama", Mesh(tp=2), [], stream="tokens")

    def edited(edit: Any) -> Any:
        signatures = {
            c.id: {
                s: replace(sig, collectives=tuple(map(edit, sig.collectives)))
                for s, sig in c.steps.items()
            }
            for c in made.plan.chunks
        }
        return replace(
            made.plan, chunks=tuple(replace(c, steps=signatures[c.id]) for c in made.plan.chunks)
        )

    moved = edited(lambda c: replace(c, why=re.sub(r":\d+:", ":999:", c.why)))
    assert moved != made.plan and moved.key == made.plan.key
    assert edited(lambda c: replace(c, nbytes=c.nbytes + 8)).key != made.plan.key
