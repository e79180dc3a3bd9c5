"""The edges of a graph of all microbatches from those of microbatch 0: the same nodes in the same order, without making them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from piper_compiler.passes.arrays import Ints, ints
from piper_compiler.passes.dependencies import Dependencies, targets
from piper_compiler.uniform import Uniform


def repeated(uniform: Uniform, one: Dependencies) -> Dependencies:
    """What `dependencies` gives for the complete graph of all microbatches. `one`: of the complete graph of microbatch 0."""
    numbers = list(_numbers(uniform, one))
    total = numbers[-1][-1] + 1  # an Update is last
    of, mb = [0] * total, [-1] * total
    for k, mine in enumerate(numbers):
        span = slice(mine.start, mine.stop, mine.step)
        of[span] = [k] * len(mine)
        if one.mb[k] >= 0:
            mb[span] = range(len(mine))
    likes = {n.id.removesuffix("@0"): numbers[k] for k, n in enumerate(one.nodes)}
    pairs = [(likes[first][i], likes[then][j]) for (first, i), (then, j) in uniform.edges]
    source, target = _edges(one, [np.arange(r.start, r.stop, r.step) for r in numbers], pairs)
    adds = {key: [i for k in mine for i in numbers[k]] for key, mine in one.accumulators.items()}
    comm = [one.comm[k] for k in of]
    ordered = {i for pair in pairs for i in pair}
    return Dependencies(one.nodes, of, mb, comm, source, target, targets(source, target, total), ordered, adds, {})


def _edges(one: Dependencies, numbers: list[Ints], pairs: list[tuple[int, int]]) -> tuple[Ints, Ints]:
    """The edges by target: from nodes of the same microbatch, to or from all of one of the whole step, and `pairs`."""
    sources, targets = [ints(i for i, _ in pairs)], [ints(i for _, i in pairs)]
    for j, k in zip(one.source[::-1].tolist(), one.target[::-1].tolist(), strict=True):
        them, mine = numbers[j], numbers[k]
        n = max(len(them), len(mine))
        sources.append(np.repeat(them, n // len(them)))
        targets.append(np.repeat(mine, n // len(mine)))
    source, target = np.concatenate(sources[::-1]), np.concatenate(targets[::-1])
    order = np.argsort(target, kind="stable")
    return source[order], target[order]


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
