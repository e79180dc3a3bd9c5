"""The edges of a graph of all microbatches from those of microbatch 0: the same nodes in the same order, without making them."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from itertools import repeat

from piper_compiler.passes.dependencies import Dependencies
from piper_compiler.uniform import Uniform


def repeated(uniform: Uniform, one: Dependencies) -> Dependencies:
    """What `dependencies` gives for the complete graph of all microbatches. `one`: of the complete graph of microbatch 0."""
    numbers = list(_numbers(uniform, one))
    total = numbers[-1][-1] + 1  # an Update is last
    of, mb = [0] * total, [-1] * total
    before: list[list[int]] = [[]] * total
    after: list[list[int]] = [[]] * total
    for k, mine in enumerate(numbers):
        span = slice(mine.start, mine.stop, mine.step)
        of[span] = [k] * len(mine)
        if one.mb[k] >= 0:
            mb[span] = range(len(mine))
        before[span] = _edges(mine, [numbers[j] for j in one.before[k]])
        after[span] = _edges(mine, [numbers[j] for j in one.after[k]])
    likes = {n.id.removesuffix("@0"): numbers[k] for k, n in enumerate(one.nodes)}
    ordered = set[int]()
    for (first, i), (then, j) in uniform.edges:
        a, b = likes[first][i], likes[then][j]
        before[b].append(a)
        insort(after[a], b)
        ordered.add(a)
        ordered.add(b)
    adds = {key: [i for k in mine for i in numbers[k]] for key, mine in one.accumulators.items()}
    comm = [one.comm[k] for k in of]
    return Dependencies(one.nodes, of, mb, comm, before, after, ordered, adds, {})


def _edges(mine: range, others: list[range]) -> list[list[int]]:
    """For each of `mine`, its neighbours: of the same microbatch, or all if it is of the whole step."""
    if not others:
        return [[] for _ in mine]
    if len(mine) == 1:
        return [[i for them in others for i in them]]
    same = [them if len(them) > 1 else repeat(them[0], len(mine)) for them in others]
    return [list(row) for row in zip(*same, strict=True)]


def _numbers(uniform: Uniform, one: Dependencies) -> Iterator[range]:
    """Of each node of microbatch 0, the numbers of its likes by microbatch, or its own if it is of the whole step: compute stands
    node by node, transfers by group and microbatch, then what completes the graph."""
    count, at = uniform.microbatches, 0
    sizes = [len(group) for group in uniform.transfers if group]
    compute = one.mb.count(0) - sum(sizes)
    for _ in range(compute):
        yield range(at, at + count)
        at += count
    for size in sizes:
        for k in range(size):
            yield range(at + k, at + size * count, size)
        at += size * count
    for _ in range(one.mb.count(-1)):
        yield range(at, at + 1)
        at += 1


def in_microbatch(name: str, mb: int) -> str:
    """The id of the like of a node of microbatch 0."""
    head, _, tail = name.rpartition("@0")
    return f"{head}@{mb}{tail}"
