"""Compare a loss on some rows with the losses of their parts, with random numbers for the inputs of both."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor, fx

from piper_capture.chunks.replay import RandomWatch
from piper_capture.torch_api import _torch
from piper_capture.trace.dynamo import Counted, Forward
from piper_capture.trace.own_backwards import own_backwards
from piper_capture.values.concrete import concrete_call, tensors_of
from piper_capture.whole_batch.batch_loss.calls import has_rows
from piper_capture.whole_batch.batch_loss.reductions import (
    CLASSES,
    IGNORED,
    arguments,
    call_name,
)
from piper_capture.whole_batch.batch_loss.terms import Dependence
from piper_capture.whole_batch.batch_loss.writers import ancestors, is_size, with_writers

ROWS, PARTS = 4, 2
HALVES = frozenset({"float", "half", "bfloat16"})
"""The methods that make another floating-point type."""
MERGED = 3
"""The most tensors with rows and tokens in one dimension for which each order is tried."""
BESIDE = {"eq": 0, "ne": 0, "not_equal": 0, "ge": -1, "gt": 0, "le": 1, "lt": 0}
"""The distance from a constant of the integer that a comparison with it tells from most others."""
COUNTED = {"ge": (0, 1), "gt": (1, 1), "le": (0, -1), "lt": (-1, -1)}
"""The first integer that a comparison with a constant counts, by its distance from this, and the step to the next.

Floating-point numbers lie around it.
"""
MISSING = {"isinf": math.inf} | dict.fromkeys(
    ("isnan", "isfinite", "nan_to_num", "nansum", "nanmean"), math.nan
)
"""The number that a call treats apart from all others."""
MOST = 2**24
"""The largest number of elements in a tensor of the loss for which it is computed: one to two seconds per filling."""
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""The relative differences that rounding explains; in half precision 0.03."""


MANY = 2**20
"""The largest for which all fillings are tried."""


@dataclass(frozen=True)
class Filling:
    """Say which numbers a trial has.

    Attributes:
        seed: of the random numbers.
        integers: how many there are, from 0.
        spread: how far floating-point numbers spread around 0; None for numbers from 0.05 to 0.95, so that they may be
            logits, probabilities or weights.
        double: whether all is computed in float64, so that small terms show.
        ignoring: whether some targets are numbers that the loss is thought to ignore.
        counted: whether the others are numbers that a comparison counts.
        missing: whether some floating-point numbers of the batch are NaN, or infinite, if the loss asks for such.
        turn: which of several numbers that a loss may ignore is among the targets.
    """

    seed: int
    integers: int = 2
    spread: float | None = None
    double: bool = True
    ignoring: bool = True
    counted: bool = False
    missing: bool = False
    turn: int = 0


FILLINGS = (
    Filling(0),
    Filling(1, integers=5, ignoring=False),
    Filling(2, integers=5, spread=1.0),
    Filling(3, spread=3.0),
    Filling(4, counted=True),
)
"""The numbers of trials; a loss need not take all of them, such as an index that is too large."""


@dataclass(frozen=True)
class Original:
    """Keep a loss as the user wrote it, in a graph of its own, while the captured graph is rewritten.

    Attributes:
        loss: its node.
        copies: node of the captured graph -> the same in this one.
    """

    loss: fx.Node
    copies: Mapping[fx.Node, fx.Node]

    @classmethod
    def of(cls, forward: Forward) -> Original:
        """Return the loss of a graph as it is now."""
        copies: dict[fx.Node, fx.Node] = {}
        fx.Graph().graph_copy(forward.graph, copies)
        return cls(copies[forward.loss], copies)

    def given(self, values: Mapping[fx.Node, Tensor]) -> dict[fx.Node, Tensor]:
        """Return the values of nodes of the captured graph by their copies."""
        return {self.copies[node]: value for node, value in values.items() if node in self.copies}


@dataclass(frozen=True)
class TrialResults:
    """Hold the values of some rows, and the gradients of these values.

    Attributes:
        values: the numbers that were asked for.
        gradients: for each of them, the gradients of the loss's inputs, a tensor for each input that has one.
    """

    values: tuple[float, ...]
    gradients: tuple[tuple[Tensor, ...], ...]


class LossTrial:
    """Run the tail of a graph, from the last use of a parameter to the loss, on random numbers.

    Integers are small, and targets include the index that a loss ignores. `possible` says whether the tail is small
    enough, and its rows can be told apart.
    """

    def __init__(self, forward: Forward, tail: Collection[fx.Node], original: Original) -> None:
        self._forward, self._tail, self._original = forward, set(tail), original
        self._within = self._tail.union(original.copies[n] for n in tail if n in original.copies)
        self._sources = list(
            dict.fromkeys(
                n
                for node in tail
                for n in node.all_input_nodes
                if n not in self._tail and tensors_of(n)
            )
        )
        self._merged: list[fx.Node] = []
        self._tokens_first, self._filling = frozenset[fx.Node](), FILLINGS[0]
        self._counted: dict[fx.Node, tuple[float, int]] = {}
        self._targets, self._close = self._ignored_targets(), 0.0
        self._missing = self._missing_numbers()
        self.possible = self._small() and all(self._dimension(n) is not None for n in self._sources)

    def unknown(self, of: Mapping[fx.Node, Dependence]) -> fx.Node | None:
        """Return an input of the tail without rows that rows were mixed into before; None if there is none."""
        return next((n for n in self._sources if of[n].mixed is not None and not has_rows(n)), None)

    def _small(self) -> bool:
        nodes = [*self._tail, *self._sources]
        tensors = [t for n in nodes for t in tensors_of(n)]
        if any(_torch.data_dependent(t) for t in tensors) or any(
            isinstance(n.meta.get("example_value"), tuple) for n in self._sources
        ):
            return False
        return self._largest() <= MOST

    def _largest(self) -> int:
        tensors = [t for n in (*self._tail, *self._sources) for t in tensors_of(n)]
        return max(
            (prod(int(_torch.size_at(s, ROWS)) for s in t.shape) for t in tensors), default=0
        )

    def _dimension(self, node: fx.Node) -> int | None:
        """Return the dimension that has the rows: -1 if none has, None if they cannot be told apart in it."""
        (tensor,) = tensors_of(node)
        symbolic = [d for d, size in enumerate(tensor.shape) if _torch.is_symbolic(size)]
        if not symbolic:
            return -1
        sizes = [int(_torch.size_at(tensor.shape[d], ROWS)) for d in symbolic]
        if sizes[0] != ROWS and node not in self._merged:
            self._merged.append(node)
        return symbolic[0] if len(symbolic) == 1 and sizes[0] % PARTS == 0 else None

    def _ignored_targets(self) -> dict[fx.Node, list[float]]:
        """Return the numbers of the batch that may be targets, with the targets that the loss may ignore.

        An ignored target is the `ignore_index` of a loss of classes, an integer on the ignored side of a comparison,
        and, for a function with a backward of its own, any of its integer arguments, or the usual one.
        """
        ignored_by_target: dict[fx.Node, list[float]] = {}
        own = set(own_backwards(self._tail))
        for node in (n for n in self._forward.graph.nodes if n in self._tail):
            if node.op == "call_function" and call_name(node) in CLASSES:
                by_name = arguments(node)
                read, ignored = [by_name["target"]], [by_name.get("ignore_index", IGNORED)]
                if by_name["target"].meta["example_value"].is_floating_point():
                    continue
            elif node in own:
                inside = [beside for n in self._inside(node) for beside in _beside(n)]
                given = [a for a in (*node.args, *node.kwargs.values()) if type(a) is int]
                read, ignored = node.all_input_nodes, [*inside, *given, IGNORED]
            else:
                read, ignored = node.all_input_nodes, _beside(node)
            for reached in ancestors(read).intersection(self._sources) if ignored else ():
                known = ignored_by_target.setdefault(reached, [])
                known.extend(number for number in ignored if number not in known)
                if call_name(node) in COUNTED:
                    first, step = COUNTED[call_name(node)]
                    around = any(t.is_floating_point() for t in tensors_of(reached))
                    at = node.args[1] + (0 if around else first)
                    self._counted.setdefault(reached, (at, step))
        return ignored_by_target

    def _inside(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the nodes of the graphs that a function of the user's was captured as."""
        for name in (str(n.target) for n in node.all_input_nodes if n.op == "get_attr"):
            body = getattr(self._forward.owner, name)
            parts = body.modules() if isinstance(body, fx.GraphModule) else ()
            for part in (p for p in parts if isinstance(p, fx.GraphModule)):
                yield from part.graph.nodes

    def _missing_numbers(self) -> dict[fx.Node, float]:
        """Return the floating-point numbers of the batch that may be missing, with NaN or infinity in their place."""
        found: dict[fx.Node, float] = {}
        for node in self._tail:
            names = {call_name(n) for n in (node, *self._inside(node))}.intersection(MISSING)
            for reached in ancestors(node.all_input_nodes).intersection(self._sources):
                floating = any(t.is_floating_point() for t in tensors_of(reached))
                if names and floating and not _trained(reached):
                    found[reached] = MISSING[min(names)]
        return found

    def adds_up(self, made: Forward) -> bool | None:
        """Return whether the loss of parts gives the user's loss of the whole, in value and gradient.

        None if that cannot be found out.
        """
        if not self.possible:
            return None
        if len(self._merged) > MERGED:
            return self._judged(made) or None
        kinds = [
            part for k in range(len(self._merged) + 1) for part in combinations(self._merged, k)
        ]
        for self._tokens_first in map(frozenset, kinds):  # rows may lie within tokens
            verdict = self._judged(made)
            if verdict is not False:
                return verdict
        return False

    def _judged(self, made: Forward) -> bool | None:
        fillings = [*(FILLINGS if self._largest() <= MANY else FILLINGS[::2])]
        if self._missing:
            fillings.append(Filling(5, missing=True))
        fillings = [replace(filling, turn=turn) for turn, filling in enumerate(fillings)]
        verdict = self._all(made, fillings)
        if verdict is None:  # an operation may not take float64
            verdict = self._all(made, [replace(filling, double=False) for filling in fillings])
        return verdict

    def _all(self, made: Forward, fillings: Sequence[Filling]) -> bool | None:
        """Return whether all numbers that the loss takes add up; None if it takes none."""
        good = None
        for filling in fillings:
            verdict = self._tried(made, filling)
            if verdict is False:
                return False
            good = verdict or good
        return good

    def _tried(self, made: Forward, filling: Filling) -> bool | None:
        self._filling = filling
        asked = (made.loss,) if made.weight is None else (made.loss, made.weight)
        try:
            whole, parts = self._values()
            if made.counted is not None:
                totals = self._totals(made.counted, parts, ROWS // PARTS)
                parts = [{**part, made.counted.totals: totals} for part in parts]
                whole[made.counted.totals] = self._totals(made.counted, [whole], ROWS)
            self._close = 0.0
            wanted = self._run((self._original.loss,), self._original.given(whole), ROWS)
            results = [self._run(asked, part, ROWS // PARTS) for part in parts]
            return self._equal(made, results, wanted)
        except (*_torch.RUN_ERRORS, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
            return None

    def _equal(
        self, made: Forward, parts: Sequence[TrialResults], wanted: TrialResults
    ) -> bool | None:
        share = {"mean": 1 / PARTS, "total": 1.0}.get(made.loss_kind) or 1 / sum(
            p.values[1] for p in parts
        )
        close = self._close
        value = sum(p.values[0] for p in parts) * share
        good = _near(
            torch.tensor(value, dtype=torch.float64),
            torch.tensor(wanted.values[0], dtype=torch.float64),
            close,
        )
        trained = [n for n in self._sources if _trained(n)]
        for k, (node, gradient) in enumerate(zip(trained, wanted.gradients[0], strict=False)):
            pieces = [p.gradients[0][k] * share for p in parts]
            good = good and _near(self._joined(node, pieces, gradient), gradient, close)
        return good

    def _totals(
        self, counted: Counted, parts: Sequence[Mapping[fx.Node, Tensor]], rows: int
    ) -> Tensor:
        """Return the numbers that are counted in all parts."""
        evaluated = [self._evaluated(counted.reductions, part, rows) for part in parts]
        flat = [
            torch.cat([torch.ones(1), *(r.detach().double().reshape(-1) for r in results)])
            for results in evaluated
        ]
        return torch.stack(flat).sum(0)

    def _joined(self, node: fx.Node, pieces: Sequence[Tensor], whole: Tensor) -> Tensor:
        """Join the gradients of parts; gradients of tensors that all rows share are added up."""
        if pieces[0].shape == whole.shape:
            return torch.stack(list(pieces)).sum(0)
        dim = next(d for d in range(whole.dim()) if pieces[0].shape[d] != whole.shape[d])
        if node in self._tokens_first:
            return torch.cat(
                [p.unflatten(dim, (-1, ROWS // PARTS)) for p in pieces], dim + 1
            ).flatten(dim, dim + 1)
        return torch.cat(list(pieces), dim)

    def _values(self) -> tuple[dict[fx.Node, Tensor], list[dict[fx.Node, Tensor]]]:
        """Return numbers for all inputs of the tail, and the same cut into parts."""
        generator = torch.Generator().manual_seed(self._filling.seed)
        whole = {n: self._random(n, generator) for n in self._sources}
        return whole, [
            {n: self._part(n, value, k) for n, value in whole.items()} for k in range(PARTS)
        ]

    def _random(self, node: fx.Node, generator: torch.Generator) -> Tensor:
        (tensor,) = tensors_of(node)
        shape = [int(_torch.size_at(s, ROWS)) for s in tensor.shape]
        spread = self._filling.spread
        if tensor.is_floating_point():
            draw = torch.rand if spread is None else torch.randn
            numbers = draw(shape, generator=generator, dtype=torch.float64)
            numbers = numbers.mul_(0.9).add_(0.05) if spread is None else numbers.mul_(spread)
            if self._filling.counted and node in self._counted:  # on both sides
                first, step = self._counted[node]
                numbers = numbers.sub_(0.3).mul_(step).add_(first)
            if self._filling.missing and node in self._missing:
                numbers[_more_at_first(shape, generator)] = self._missing[node]
            return self._precise(numbers.to(tensor.dtype))
        if tensor.dtype == torch.bool:
            return torch.rand(shape, generator=generator) > 0.5
        ones = torch.randint(self._filling.integers, shape, generator=generator)
        if self._filling.counted and node in self._counted:
            first, step = self._counted[node]
            ones = int(first) + step * ones
        if node in self._targets and self._filling.ignoring:
            several = self._targets[node]
            ignored = several[self._filling.turn % len(several)]
            return torch.where(_more_at_first(shape, generator), ignored, ones).to(tensor.dtype)
        return ones.to(tensor.dtype)

    def _part(self, node: fx.Node, value: Tensor, k: int) -> Tensor:
        dim = self._dimension(node)
        if node in self._tokens_first and dim is not None:
            return value.unflatten(dim, (-1, ROWS)).chunk(PARTS, dim + 1)[k].flatten(dim, dim + 1)
        return value if dim is None or dim < 0 else value.chunk(PARTS, dim)[k]

    def _run(
        self, asked: Sequence[fx.Node], values: Mapping[fx.Node, Tensor], rows: int
    ) -> TrialResults:
        leaves = {n: v.detach().requires_grad_(_trained(n)) for n, v in values.items()}
        results = self._evaluated(asked, leaves, rows)
        trained = [v for v in leaves.values() if v.requires_grad]
        return TrialResults(
            tuple(float(r.detach()) for r in results),
            tuple(self._gradients(r, trained) for r in results),
        )

    def _evaluated(
        self, asked: Sequence[fx.Node], leaves: Mapping[fx.Node, Tensor], rows: int
    ) -> list[Tensor]:
        """Return the values of nodes; leaves are copied, since nodes may write into them.

        Random numbers are among the leaves, and so may be the tensors that they are made of.
        """
        env: dict[fx.Node, Any] = {
            n: v * 1 if v.requires_grad else v.clone() for n, v in leaves.items()
        }
        graph = next((node.graph for node in asked), self._forward.graph)
        before = (
            with_writers(graph, ancestors(leaves)) - self._within
        )  # of which leaves have what was written
        needed = with_writers(graph, ancestors(asked)) - before
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), RandomWatch() as watch:
            for node in graph.nodes:
                if node.op == "get_attr":
                    env[node] = self._precise(getattr(self._forward.owner, str(node.target)))
                elif node in needed and node.op != "placeholder" and not is_size(node):
                    args, kwargs = concrete_call(node, env, rows)
                    if self._filling.double and node.target in HALVES:
                        env[node] = args[
                            0
                        ].double()  # rounded to float32 in between, parts would differ
                    else:
                        both = (
                            (_doubled(args), _doubled(kwargs))
                            if self._filling.double
                            else (args, kwargs)
                        )
                        env[node] = _call(node, *both)
        if watch.seen:
            raise ValueError("random numbers")
        floating = {
            t.dtype for t in env.values() if isinstance(t, Tensor) and t.is_floating_point()
        }
        self._close = max(self._close, *(CLOSE.get(dtype, 0.03) for dtype in floating), 1e-9)
        return [env[n] for n in asked]

    def _precise(self, value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.double() if floating and self._filling.double else value

    def _gradients(self, result: Tensor, trained: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if not trained or not result.requires_grad:
            return ()
        grads = torch.autograd.grad(result, trained, retain_graph=True, allow_unused=True)
        return tuple(
            torch.zeros_like(t) if g is None else g for g, t in zip(grads, trained, strict=True)
        )


def _doubled(values: Any) -> Any:
    """Return arguments with float64 in place of another floating-point type."""
    return _torch.pytree.tree_map(
        lambda v: torch.float64 if isinstance(v, torch.dtype) and v.is_floating_point else v, values
    )


def _call(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _beside(node: fx.Node) -> list[float]:
    """Return the number on the ignored side of a comparison with a constant, in a list; no number for other calls."""
    constant = node.args[1] if call_name(node) in BESIDE and len(node.args) > 1 else None
    if isinstance(constant, int | float) and not isinstance(constant, bool):
        return [constant + BESIDE[call_name(node)]]
    return []


def _more_at_first(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return a mask that is true at random places, in the first part more often than in the second."""
    often = torch.linspace(0.7, 0.1, shape[0] if shape else 1)
    return torch.rand(shape, generator=generator) < often.reshape(-1, *[1] * (len(shape) - 1))


def _trained(node: fx.Node) -> bool:
    return any(t.requires_grad for t in tensors_of(node))


def _near(a: Tensor, b: Tensor, close: float) -> bool:
    """Return whether two tensors differ by no more than rounding; numbers that are not finite say nothing."""
    difference, norm = float((a.double() - b.double()).norm()), float(b.double().norm())
    if not isfinite(difference + norm):  # as soon as one number of either is not
        raise ValueError("not finite")
    return difference <= close * (norm + 1e-6)
