"""Describe kernel stacks: whose kernels run a model.

Constants of a device differ between stacks. So each stack has data of its own, data/stacks.toml: published facts with
their source; nothing is fitted. A cluster file may describe further stacks, in tables of the same form.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from piper_simulator.cluster.checks import (
    FRACTION,
    TEXT,
    KeyPath,
    Positive,
    Text,
    checks_of,
    list_of_each,
    mapping,
    one_of,
    table,
)

KINDS = ("matmul", "attention", "norm", "elementwise", "embedding", "loss", "other")
GENERATIONS = ("ampere", "hopper", "blackwell")


Fractions = tuple[Positive, Positive]
"""The fractions of the peak that a kernel reaches, forward and backward."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Describe a kernel stack: whose kernels run a model, and how.

    Attributes:
        name: as in "h100x8@eager".
        attention: name of the attention kernel.
        attention_fraction: generation of devices -> fraction of the 16-bit peak that the kernel reaches, forward and
            backward.
        lowering: an operator that is one node of a plan is "one kernel", or the kernels that eager "torch" launches for
            it (`piper_simulator.durations.eager_launches`).
        optimizer: how parameters are updated (`piper_simulator.durations.updates`).
        fused: kinds of kernels that are launched as one kernel per step.
        saved: tensors that a forward keeps for its backward by default; for people, since a plan has its own.
        overlap: messages that run beside computation by default; for people, since a plan has its own.
        source: where these facts come from.
    """

    name: Text
    attention: Text
    attention_fraction: Mapping[str, Fractions]
    lowering: Literal["torch", "one kernel"]
    optimizer: Literal["fused", "foreach"]
    fused: tuple[Annotated[str, one_of(*KINDS)], ...]
    saved: Text
    overlap: tuple[Text, ...]
    source: Text


_STACK = {
    key: check
    for key, check in checks_of(Stack).items()
    if key not in ("name", "attention_fraction")
}
_ATTENTION = table({"source": TEXT} | dict.fromkeys(GENERATIONS, list_of_each(FRACTION, FRACTION)))
TABLES = {"attention": mapping(_ATTENTION), "stacks": mapping(table(_STACK))}
"""The checks of the tables that describe stacks and attention kernels, in every file that may have them."""


def described_stacks(
    file: Mapping[str, Any], kernels: Mapping[str, Any], where: KeyPath
) -> dict[str, Stack]:
    """Return the stacks that a file describes, by name.

    `file` holds tables that fit TABLES; `kernels` are the attention kernels that its stacks may use beside its own.
    Raises ClusterError with the keys of a stack that lacks a field or has an unknown attention kernel.
    """
    known = {**kernels, **file.get("attention", {})}
    return {
        name: _stack(name, entry, known, where.at("stacks").at(name))
        for name, entry in file.get("stacks", {}).items()
    }


def _stack(name: str, entry: dict[str, Any], kernels: Mapping[str, Any], where: KeyPath) -> Stack:
    if missing := [k for k in _STACK if k not in entry]:
        raise where.error(f"{', '.join(missing)} missing")
    if entry["attention"] not in kernels:
        raise where.at("attention").error(
            f"no kernel {entry['attention']!r}; known: {', '.join(kernels)}"
        )
    reached = {g: tuple(f) for g, f in kernels[entry["attention"]].items() if g in GENERATIONS}
    lists = {k: tuple(entry[k]) for k in ("fused", "overlap")}
    return Stack(**(entry | lists | {"name": name, "attention_fraction": reached}))


_DATA = Path(__file__).parent / "data" / "stacks.toml"
_BUILT_IN = table(TABLES)(tomllib.loads(_DATA.read_text(encoding="utf-8")), KeyPath(str(_DATA)))
ATTENTION_KERNELS: Mapping[str, Any] = _BUILT_IN["attention"]
"""The built-in attention kernels by name: by generation, the fractions of the peak that they reach, and a source."""
STACKS: Mapping[str, Stack] = described_stacks(_BUILT_IN, {}, KeyPath(str(_DATA)))
