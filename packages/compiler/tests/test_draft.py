"""Waits and frees of whole columns of instructions equal those found instruction by instruction."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import piper_compiler.compile as passes
from packages.compiler.tests.compile_cases import random_case
from piper_compiler import compile_program
from piper_compiler.passes.steps.arrays import index_in_run, int_array, run_starts
from piper_compiler.passes.steps.dependencies import targets
from piper_compiler.passes.steps.draft import Draft, WaitEdges
from piper_compiler.passes.steps.release import Releases, Uses, releases
from piper_compiler.passes.steps.templates import Drafted
from piper_ir.fold.timing import IssueOrder, Times
from piper_ir.plan.plan import COMPUTE
from tests.helpers.cases import each_case

Frees = tuple[dict[int, list[int]], dict[int, list[int]], set[tuple[int, int]]]
"""Part -> values that die after it, instruction -> values that die before it, (instruction, what it waits for)."""


def plain_waits(draft: Draft, waits: WaitEdges) -> list[tuple[int, ...]]:
    """In program order, with a memory per stream of what it has waited for."""
    wanted = defaultdict(list)
    for i, j in zip(waits.waiter.tolist(), waits.target.tolist(), strict=True):
        wanted[i].append(j)
    names = [
        order.streams[nodes[0] - a]
        for nodes in draft.bare.streams
        for order, a in [own(draft, nodes[0])]
    ]
    known: dict[tuple[int, int], int] = {}
    out = []
    for i, stream in enumerate(draft.bare.stream_of):
        fresh: dict[int, int] = {}
        for j in wanted[i]:
            of = draft.bare.stream_of[j]
            if j > known.get((stream, of), -1):
                known[stream, of] = fresh[of] = j
        out.append(tuple(j for _, j in sorted((names[of], j) for of, j in fresh.items())))
    return out


def own(draft: Draft, i: int) -> tuple[IssueOrder, int]:
    """The issue order that instruction i is in, and where it begins."""
    return next(
        (o, a)
        for o, (a, b) in zip(draft.orders, pairwise(draft.offsets), strict=True)
        if a <= i < b
    )


def plain_releases(draft: Draft, uses: Uses, times: Times) -> Frees:
    """Find the frees value by value, one reader after the other."""
    last: dict[int, int] = {}
    sent: dict[int, list[int]] = {}
    for value, part in zip(uses.value.tolist(), uses.part.tolist(), strict=True):
        last[value] = part
    for value, i in zip(uses.sent.tolist(), uses.sender.tolist(), strict=True):
        sent.setdefault(value, []).append(i)
    frees, before, waits = defaultdict(list), defaultdict(list), set()
    for value, senders in sent.items():
        mine = [k for k in draft.compute.tolist() if own(draft, k) == own(draft, senders[0])]
        end = max(times.done[i] for i in senders)
        k = next((k for k in mine if times.start[k] >= end and k > senders[-1]), mine[-1])
        part = last.pop(value, None)
        if part is not None and uses.instr[part] >= k:
            k = int(uses.instr[part])
            frees[part].append(value)
        else:
            before[k].append(value)
        waits |= {(k, i) for i in senders}
    for value, part in last.items():
        frees[part].append(value)
    return dict(frees), dict(before), waits


def as_dicts(found: Releases) -> Frees:
    frees, before = defaultdict(list), defaultdict(list)
    for value, part in zip(found.freed.tolist(), found.after.tolist(), strict=True):
        frees[part].append(value)
    for value, i in zip(found.early.tolist(), found.before.tolist(), strict=True):
        before[i].append(value)
    return (
        dict(frees),
        dict(before),
        set(zip(found.waits.waiter.tolist(), found.waits.target.tolist(), strict=True)),
    )


@each_case("seed", range(0, 240, 12))
def test_waits_and_frees_are_those_found_one_by_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def compared(draft: Draft, uses: Uses, times: Times, buffers: Any, returns: Any) -> Releases:
        assert not len(buffers[0]) and not len(returns[0])
        found = releases(draft, uses, times, buffers, returns)
        assert as_dicts(found) == plain_releases(draft, uses, times)
        for waits in (draft.waits, draft.waits + found.waits):
            assert list(draft.issue.waits_of(draft.issue.needed(waits))) == plain_waits(
                draft, waits
            )
        seen.append(len(found.freed))
        return found

    monkeypatch.setattr(passes, "releases", compared)
    case = random_case(seed)
    compile_program(
        case.program, case.strategy, global_batch=case.global_batch, training=case.training
    )
    assert seen and seen[0] > 0


def test_instructions_run_every_node_once_and_in_their_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Drafted] = []
    original = Drafted._uses
    monkeypatch.setattr(Drafted, "_uses", lambda self: made.append(self) or original(self))
    for seed in range(5, 60, 9):
        case = random_case(seed)
        graph = compile_program(
            case.program, case.strategy, global_batch=case.global_batch, training=case.training
        ).graph
        found = made.pop()
        nodes = list(graph.nodes.values())
        assert sorted(i for task in found.draft.tasks for i in task) == list(range(len(nodes)))
        for stream, task in zip([t.stream for t in found.used], found.draft.tasks, strict=True):
            assert {nodes[i].stream or COMPUTE for i in task} == {stream}


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_runs(lengths: list[int]) -> None:
    assert index_in_run(int_array(lengths)).tolist() == [k for n in lengths for k in range(n)]
    assert run_starts(int_array(lengths)).tolist() == [
        sum(lengths[:k]) for k in range(len(lengths))
    ]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=20))
def test_targets(edges: list[tuple[int, int]]) -> None:
    source, target = int_array([a for a, _ in edges]), int_array([b for _, b in edges])
    assert targets(source, target, 7) == [sorted(b for a, b in edges if a == i) for i in range(7)]
