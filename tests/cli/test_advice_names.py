"""Functions, options and keywords that a refusal names exist."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator

import piper
from tests.helpers.source_tree import ROOT, parsed


def texts() -> Iterator[tuple[str, str]]:
    """(place, text) of every text in the code that is not a docstring; a formatted text without what is filled in."""
    for file in sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("packages/*/src/**/*.py")]):
        tree = parsed(file)
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in documentation
            ):
                yield f"{file.relative_to(ROOT)}:{node.lineno}", node.value


def unknown_names(text: str) -> list[str]:
    """Names in a message that do not exist: of `piper`, arguments of Job, Precision and region, and directives."""
    fields = {
        kind.__name__: {f.name for f in dataclasses.fields(kind)}
        for kind in (piper.Job, piper.Precision)
    }
    fields["region"] = {"experts", "opaque", "stage"}
    named = [
        f"piper.{n}" for n in re.findall(r"\bpiper\.([a-zA-Z]\w*)", text) if not hasattr(piper, n)
    ]
    for kind, known in fields.items():
        named += [f"{kind}({n}=" for n in re.findall(rf"\b{kind}\((\w+)=", text) if n not in known]
        named += [
            f"{kind}.{n}" for n in re.findall(rf"\b{kind}\.([a-z]\w*)", text) if n not in known
        ]
    named += [f"{n}(where(" for n in re.findall(r"\b(\w+)\(where\(", text) if not hasattr(piper, n)]
    return named


def test_what_messages_name_exists() -> None:
    internal = re.compile(r"piper\.(api|views|sessions|cli|ray|worker|published)\b")
    found = {
        place: names
        for place, text in texts()
        if not internal.search(text) and (names := unknown_names(text))
    }
    assert not found


def test_negative_control_names_that_do_not_exist_are_found() -> None:
    assert unknown_names("Remove it and use the directive unload(where(...)).") == ["unload(where("]
    assert unknown_names("set Job(precision=Precision(master='float32'))") == ["Precision(master="]
    assert unknown_names("piper.unload, Job(grad_clip=1), Job.clip, region(remat=True)") == [
        "piper.unload",
        "Job(grad_clip=",
        "Job.clip",
        "region(remat=",
    ]
    assert (
        unknown_names("piper.region(opaque=True), Job(clip_norm=1), Job.batch, split(where())")
        == []
    )
