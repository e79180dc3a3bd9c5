"""Say of each value in the loss how it depends on the rows of the batch.

A loss is a formula of reductions over rows. A microbatch has only some of the rows, so the formula must be linear in
the reductions that have gradients: then a step may add up the losses of microbatches. The divisor may be another
reduction, without gradient: a number of targets, a sum of weights.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx

from piper_capture.torch_api import _torch
from piper_capture.trace.dynamo import Forward
from piper_capture.trace.own_backwards import own_backwards
from piper_capture.whole_batch.batch_loss.calls import (
    BENT,
    CHOSEN,
    EXTREMES,
    JOINED,
    TENSORS,
    computes_with,
    counts_up,
    has_rows,
    is_multiple_of_rows,
    rows_meet,
)
from piper_capture.whole_batch.batch_loss.reductions import (
    MEANS,
    PRODUCTS,
    SUMS,
    Base,
    call_name,
    is_portable_loss,
    reduced,
)
from piper_capture.whole_batch.batch_loss.writers import (
    AUGMENTED,
    SAME,
    ancestors,
    filling,
    is_size,
    of_numbers,
    owner,
    with_writers,
    writes,
    written,
)
from piper_ops import STATISTICS

Divisor = fx.Node | Literal["batch"] | None
"""The divisor of a term: a reduction without gradient, or any function of reductions of the batch."""


@dataclass(frozen=True)
class LossTerm:
    """Describe one part of a value that is a sum of parts."""

    base: Base
    divisor: Divisor = None


@dataclass(frozen=True)
class Dependence:
    """Say how a value depends on the rows.

    Attributes:
        rows: whether it has a dimension of rows, so that each row has its own part.
        model: whether it depends on outputs of the model, beside the batch.
        grad: whether it has a gradient.
        terms: its parts, if it is a reduction over rows, or a sum of such. None if it is another function of them.
        divisor: the divisor of each row's part.
        mixed: the node at which other rows get into a row's part, or at which it ceases to be a sum of parts.
    """

    rows: bool = False
    model: bool = False
    grad: bool = False
    terms: frozenset[LossTerm] | None = frozenset()
    divisor: Divisor = None
    mixed: fx.Node | None = None

    @property
    def constant(self) -> bool:
        """Return whether it is the same in every microbatch."""
        return (
            not self.rows
            and self.terms is not None
            and all(t == LossTerm("constant") for t in self.terms)
        )

    @property
    def plain(self) -> Base | None:
        """Return "sum" or "mean" if it is just that; None for everything else."""
        if self.rows or self.terms is None or len(self.terms) != 1:
            return None
        (term,) = self.terms
        return term.base if term.divisor is None and term.base != "constant" else None


CONSTANT = Dependence(terms=frozenset({LossTerm("constant")}))


@dataclass
class Dependences:
    """Find the dependence of each node that the loss is made of, in the order of the graph.

    `tail` has the nodes behind the last use of a parameter that has rows, behind backwards of users, and behind all of
    a model that has its loss beside it; earlier nodes, and calls that write into theirs, count as the model's. `bent`
    is the first that bends a sum or mean over rows, as `clamp` does, or takes an extreme of the batch.
    """

    forward: Forward
    of: dict[fx.Node, Dependence] = field(default_factory=dict)
    tail: list[fx.Node] = field(default_factory=list)
    bent: fx.Node | None = None

    def __post_init__(self) -> None:
        wanted = with_writers(self.forward.graph, ancestors([self.forward.loss]))
        own = {
            *own_backwards(wanted),
            *(n for n in wanted if _is_of_layers(n) or STATISTICS in n.meta),
        }
        before = ancestors(
            n
            for n in wanted
            if has_rows(n) and (n in own or self._uses_parameter(n) or self._of_model_code(n))
        )
        nodes = list(self.forward.graph.nodes)
        last = max((k for k, n in enumerate(nodes) if n in before), default=0)
        before |= with_writers(self.forward.graph, before).intersection(nodes[:last])
        for node in nodes:
            if node not in wanted:
                continue
            if node.op in ("placeholder", "get_attr"):
                self.of[node] = self._leaf(node)
            elif self._random(node) or node in before:
                self.of[node] = self._of_model(node)
            else:
                self.tail.append(node)
                self.of[node] = self._found(node)
                if node.target in AUGMENTED and (target := written(node)) is not None:
                    self._now(node, target, self.of[node])

    @property
    def of_model(self) -> frozenset[str]:
        """Return the names of the operations that come before `tail`, without batch norms, which combine rows."""
        computed = (
            n
            for n in self.of
            if n.op not in ("placeholder", "get_attr") and STATISTICS not in n.meta
        )
        return frozenset(n.name for n in computed) - {n.name for n in self.tail}

    def _uses_parameter(self, node: fx.Node) -> bool:
        kinds = [self.forward.origins[n] for n in node.all_input_nodes if n in self.forward.origins]
        return (
            any(o.kind == "param" or o.name in self.forward.rewrites for o in kinds)
            or node.op == "call_module"
        )

    def _of_model_code(self, node: fx.Node) -> bool:
        """Return whether an operation stands in a module of the model, and is none of a loss that the model makes."""
        if (
            self.forward.own_loss or is_portable_loss(node) or not _grad(node)
        ):  # what it counts has no gradient
            return False
        return any(
            key.split("@")[0] in self.forward.modules
            for key in node.meta.get("nn_module_stack") or {}
        )

    def _random(self, node: fx.Node) -> bool:
        return (
            isinstance(node.target, _torch.OpOverload)
            and torch.Tag.nondeterministic_seeded in node.target.tags
        )

    def _leaf(self, node: fx.Node) -> Dependence:
        if _size_of_rows(node):
            return _size(node)
        origin = self.forward.origins.get(node)
        if origin is None or origin.kind != "batch" or origin.name in self.forward.fixed:
            kept = origin is not None and (
                origin.kind == "kept" or origin.name in self.forward.rewrites
            )
            return replace(CONSTANT, model=kept, grad=_grad(node))
        return Dependence(rows=True)

    def _of_model(self, node: fx.Node) -> Dependence:
        """Return the dependence of a node before the last use of a parameter."""
        inputs = [self.of[n] for n in node.all_input_nodes if n in self.of]
        if has_rows(node):
            by_model = (
                any(d.model for d in inputs) or self._uses_parameter(node) or self._random(node)
            )
            return Dependence(rows=True, model=by_model, grad=_grad(node))
        if all(d.constant for d in inputs):
            return replace(CONSTANT, grad=_grad(node))
        return Dependence(model=True, grad=_grad(node), terms=None, mixed=node)

    def _found(self, node: fx.Node) -> Dependence:
        if is_size(node):
            return _size(node) if _size_of_rows(node) else CONSTANT
        if filling(node) is not None:
            return Dependence(rows=True) if has_rows(node) else CONSTANT
        indexed = call_name(node) == "getitem"
        read = [n for n in of_numbers(node) if not is_size(n) or computes_with(node, n)]
        inputs = [self.of[n] for n in read if not (indexed and counts_up(n))]
        base = Dependence(model=any(d.model for d in inputs), grad=_grad(node))
        if all(d.constant for d in inputs) and not has_rows(node):
            return replace(CONSTANT, grad=base.grad)
        if writes(node) and node.target not in AUGMENTED:
            return self._written(node, inputs)
        if (
            node.target is operator.getitem
            and isinstance(node.args[0], fx.Node)
            and is_portable_loss(node.args[0])
        ):
            return self._loss_result(node)
        if is_portable_loss(node) or (not has_rows(node) and any(d.rows for d in inputs)):
            return self._reduced(node, inputs, base)
        if has_rows(node):
            return self._of_rows(node, inputs, base)
        dependence = self._formula(node, inputs, base)
        if dependence.mixed is node and call_name(node) in BENT:
            self.bent = self.bent or node
        return dependence

    def _loss_result(self, node: fx.Node) -> Dependence:
        loss = node.args[0]
        assert isinstance(loss, fx.Node)
        dependence = self.of[loss]
        return (
            Dependence(rows=True, model=dependence.model, grad=dependence.grad)
            if has_rows(node)
            else dependence
        )

    def _written(self, node: fx.Node, inputs: Collection[Dependence]) -> Dependence:
        """Record the dependence of a tensor after values are written into it."""
        target = written(node)
        assert target is not None
        old = self.of[target]
        spoiled = next((d.mixed for d in inputs if d.mixed is not None), None)
        foreign = next((d for d in inputs if not d.rows and not d.constant), None)
        if old.rows and spoiled is None and foreign is None and not any(d.divisor for d in inputs):
            new = replace(old, model=any(d.model for d in inputs))
        elif old.constant and all(d.constant for d in inputs):
            new = old
        else:
            new = replace(old, terms=None, mixed=spoiled or node)
            if call_name(node) in BENT and not old.rows:
                self.bent = self.bent or node
        self._now(node, target, new)
        return new

    def _now(self, node: fx.Node, target: fx.Node, new: Dependence) -> None:
        """Set the dependence of a tensor from here on; tensors that may share its storage become mixed with it."""
        for other in [n for n in self.of if n is not node and owner(n) is owner(target)]:
            mixed: dict[str, Any] = (
                {"terms": None, "mixed": new.mixed} if new.mixed is not None else {}
            )
            self.of[other] = replace(
                self.of[other], model=self.of[other].model or new.model, **mixed
            )
        self.of[target] = new

    def _reduced(
        self, node: fx.Node, inputs: Collection[Dependence], base: Dependence
    ) -> Dependence:
        """Return the dependence of a reduction over rows."""
        mixed = next((d.mixed for d in inputs if d.mixed is not None), None)
        how, divisors = reduced(node), {d.divisor for d in inputs if d.divisor is not None}
        others = [d for d in inputs if not d.rows and not d.constant]
        twice = (
            call_name(node) in PRODUCTS and sum(isinstance(d.divisor, fx.Node) for d in inputs) > 1
        )
        if mixed is not None or how is None or len(divisors) > 1 or others or twice:
            if not base.model and call_name(node) in EXTREMES:
                self.bent = self.bent or node
            return replace(base, terms=None, mixed=mixed or node)
        if how == "rows":
            return replace(base, rows=True, divisor=next(iter(divisors), None))
        if how == "classes":
            if divisors:
                return replace(base, terms=None, mixed=node)
            return replace(base, terms=frozenset({LossTerm("sum", node)}))
        return replace(base, terms=frozenset({LossTerm(how, next(iter(divisors), None))}))

    def _of_rows(
        self, node: fx.Node, inputs: Collection[Dependence], base: Dependence
    ) -> Dependence:
        """Return the dependence of a value with rows."""
        name = call_name(node)
        mixed = next((d.mixed for d in inputs if d.mixed is not None), None)
        numbers = [d for d in inputs if not d.rows and not d.constant]
        divisors = {d.divisor for d in inputs if d.divisor is not None}
        dependence = replace(base, rows=True)
        if mixed is not None or rows_meet(node):
            return replace(dependence, mixed=mixed or node)
        if name in ("mul", "div") and len(numbers) == 1 and not divisors:
            divisor = self._divisor(node, name, numbers[0])
            return (
                replace(dependence, mixed=node)
                if divisor is None
                else replace(dependence, divisor=divisor)
            )
        if numbers:
            known = all(d.terms is not None and not d.model for d in numbers)
            return (
                replace(dependence, divisor="batch") if known else replace(dependence, mixed=node)
            )
        if not divisors:
            return dependence
        (first, *more) = divisors
        linear = name in SAME | SUMS | MEANS | CHOSEN or (
            name == "mul" and sum(d.divisor is not None for d in inputs) == 1
        )
        linear = linear or (
            name == "div"
            and isinstance(node.args[1], fx.Node)
            and self.of[node.args[1]].divisor is None
        )
        if linear and not more:
            return replace(dependence, divisor=first)
        return (
            replace(dependence, divisor="batch")
            if not any(self._of_model_divisor(d) for d in divisors)
            else replace(dependence, mixed=node)
        )

    def _of_model_divisor(self, divisor: Divisor) -> bool:
        return isinstance(divisor, fx.Node) and self.of[divisor].model

    def _divisor(self, node: fx.Node, name: str, given: Dependence) -> Divisor:
        """Return the divisor of `rows / reduction`.

        None if the reduction has a gradient, or is not a known one.
        """
        if not given.model:
            return "batch" if given.terms is not None else None
        by = node.args[1] if len(node.args) > 1 else None
        if name != "div" or not isinstance(by, fx.Node) or self.of[by] is not given:
            return None
        return by if given.plain == "sum" and not given.grad else None

    def _formula(self, node: fx.Node, inputs: list[Dependence], base: Dependence) -> Dependence:
        """Return the dependence of a value that is made of reductions."""
        name = call_name(node)
        if not base.model:
            return self._of_batch(node, inputs, base)
        mixed = next((d.mixed for d in inputs if d.mixed is not None), None)
        spoiled = replace(base, terms=None, mixed=mixed or node)
        if mixed is not None:
            return spoiled
        terms = [d.terms for d in inputs if d.terms is not None]
        if name in SAME | SUMS | MEANS and len([d for d in inputs if not d.constant]) == 1:
            return replace(base, terms=next(d.terms for d in inputs if not d.constant))
        if name in ("add", "sub", *JOINED):
            numbers = name in ("add", "sub") and any(
                not isinstance(a, fx.Node) and a != 0 for a in node.args[:2]
            )
            return replace(
                base, terms=frozenset().union(*terms, [LossTerm("constant")] if numbers else [])
            )
        if name == "where" and node.op == "call_function" and len(node.args) == 3:
            return self._chosen(node, base, spoiled)
        if name == "mul":
            return self._multiplied(node, inputs, base, spoiled)
        if name == "div" and isinstance(node.args[0], fx.Node):
            return self._divided(self.of[node.args[0]], node.args[1], base, spoiled)
        return spoiled

    def _multiplied(
        self, node: fx.Node, inputs: list[Dependence], base: Dependence, spoiled: Dependence
    ) -> Dependence:
        """Return the dependence of a product of a reduction and numbers."""
        changing = [d for d in inputs if not d.constant]
        first = next((d for d in changing if d.model), changing[0])
        others = [d for d in changing if d is not first]
        if not others and len(changing) == sum(
            isinstance(a, fx.Node) and not self.of[a].constant for a in node.args
        ):
            return replace(base, terms=first.terms)
        sizes = any(is_size(n) and not self.of[n].constant for n in node.all_input_nodes)
        if all(not d.model for d in others) and len(others) == 1 and not sizes:
            return self._over(first, "batch", base, spoiled)
        return spoiled

    def _chosen(self, node: fx.Node, base: Dependence, spoiled: Dependence) -> Dependence:
        """Return the dependence of a value that numbers of the batch choose out of two."""
        condition, *values = node.args
        if not isinstance(condition, fx.Node) or self.of[condition].model:
            return spoiled
        terms = set[LossTerm]()
        for value in values:
            dependence = (
                self.of[value]
                if isinstance(value, fx.Node)
                else CONSTANT
                if value != 0
                else Dependence()
            )
            over = self._over(dependence, "batch", base, spoiled)
            if over.terms is None:
                return spoiled
            terms |= over.terms
        return replace(base, terms=frozenset(terms))

    def _divided(
        self, over: Dependence, by: object, base: Dependence, spoiled: Dependence
    ) -> Dependence:
        """Return the dependence of a quotient of a reduction and another one, or a number."""
        if not isinstance(by, fx.Node) or self.of[by].constant:
            return replace(base, terms=over.terms)
        under = self.of[by]
        if under.grad or under.mixed is not None:
            return replace(spoiled, mixed=under.mixed or spoiled.mixed)
        if _size_of_rows(by):
            # a sum over the rows divided by their number (times anything that is constant) is a mean
            if (
                over.terms is not None
                and all(t == LossTerm("sum") for t in over.terms)
                and is_multiple_of_rows(by.meta["example_value"])
            ):
                return replace(base, terms=frozenset({LossTerm("mean")}))
            return spoiled
        if (
            under.plain is not None
            and over.terms is not None
            and all(t == LossTerm(under.plain) for t in over.terms)
        ):
            return replace(base, terms=frozenset({LossTerm(under.plain, by)}))
        return spoiled if under.model else self._over(over, "batch", base, spoiled)

    def _over(
        self, over: Dependence, divisor: Divisor, base: Dependence, spoiled: Dependence
    ) -> Dependence:
        if over.terms is None or any(t.divisor not in (None, divisor) for t in over.terms):
            return spoiled
        return replace(base, terms=frozenset(LossTerm(t.base, divisor) for t in over.terms))

    def _of_batch(self, node: fx.Node, inputs: list[Dependence], base: Dependence) -> Dependence:
        """Return the dependence of a number that the batch alone decides.

        Sums and means of such numbers stay sums and means; any other function of them is one of the whole batch.
        """
        mixed = next((d.mixed for d in inputs if d.mixed is not None), None)
        if mixed is not None:
            return replace(base, terms=None, mixed=mixed)
        changing = [d for d in inputs if not d.constant]
        name, kinds = call_name(node), {d.plain for d in changing}
        numbers = any(not isinstance(a, fx.Node) and a != 0 for a in node.args[:2])
        same = name in SAME | SUMS | MEANS | TENSORS and len(changing) == 1
        same |= name in ("add", "sub") and len(changing) == len(inputs) and not numbers
        same |= (name == "mul" and len(changing) == 1) or (
            name == "div" and len(changing) == 1 and _first_changes(node, self.of)
        )
        if same and len(kinds) == 1 and None not in kinds:
            return replace(base, terms=frozenset({LossTerm(changing[0].plain or "sum")}))
        return replace(base, terms=frozenset({LossTerm("sum", "batch")}))


def _first_changes(node: fx.Node, of: Mapping[fx.Node, Dependence]) -> bool:
    first = node.args[0]
    return isinstance(first, fx.Node) and not of[first].constant


def _is_of_layers(node: fx.Node) -> bool:
    """Return whether a node is a portable op of layers, such as attention, or one that sorts tokens by expert."""
    return (
        isinstance(node.target, _torch.OpOverload)
        and node.target.namespace == "piper"
        and not is_portable_loss(node)
    )


def _grad(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    values = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(v, Tensor) and v.requires_grad for v in values)


def _size_of_rows(node: fx.Node) -> bool:
    return is_size(node) and not isinstance(node.meta["example_value"], int | float)


def _size(node: fx.Node) -> Dependence:
    """Return the dependence of a number that is a size of the batch: multiples of the rows add up."""
    return Dependence(
        terms=frozenset(
            {LossTerm("sum", None if is_multiple_of_rows(node.meta["example_value"]) else "batch")}
        )
    )
