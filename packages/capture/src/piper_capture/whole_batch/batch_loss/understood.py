"""Find the form of a loss that adds up over microbatches to the loss of the whole batch, or refuse it by name."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import get_args

import torch
from torch import fx

from piper_capture.chunks.rowpairs import compares_rows
from piper_capture.module.metric_calls import MetricNode
from piper_capture.steps.linearity import AuxiliaryForm
from piper_capture.trace.dynamo import Forward
from piper_capture.values.concrete import line_of
from piper_capture.whole_batch.batch_loss.pairs import (
    WrittenPair,
    same_values,
    write_divisions,
)
from piper_capture.whole_batch.batch_loss.terms import Dependences
from piper_capture.whole_batch.batch_loss.totals import Totals
from piper_capture.whole_batch.batch_loss.trial import LossTrial, Original
from piper_capture.whole_batch.batch_loss.writers import writes
from piper_ir.ground.errors import CaptureError
from piper_ir.program.program import LossKind
from piper_ops import Builder, Examples

WAYS_OUT = (
    "A step computes the loss of some of its rows at a time and adds them up, so the loss must be a sum over rows, "
    "a mean over rows, or such a sum divided by a number of the batch. Accepted is, too, a pair of scalars (sum, "
    "weight), both sums over rows: the loss of the whole batch is then the sum of the first divided by the sum of the "
    "second. "
    'Job(loss_over="microbatch") trains the '
    "mean of the losses of microbatches instead, as gradient accumulation in plain PyTorch does; it then depends "
    "on their number"
)
BENT_REASON = (
    "takes one of several values by a sum, a mean or an extreme of the rows, and microbatches may "
    "take another than the batch"
)


def over_whole_batch(
    forward: Forward, adding: AuxiliaryForm = "", *, scaled: bool = False
) -> Forward:
    """Return the graph with a loss that adds up over microbatches to the loss of the whole batch.

    A mean over rows stays as it is, and so does a pair of the user's whose numbers both add up. `adding` is the kind of
    auxiliary gradients that the model adds to the gradients of the loss: they may not be divided by the weight of a
    pair, nor may gradients that are rounded by their size, or that overflow if a scale multiplies the sum (`scaled`).
    Raises CaptureError, with the line, for a loss that is another function of the rows.
    """
    undivided = bool(adding) or forward.quantised or scaled
    if forward.weight is not None:
        pair, forward = forward, _divided(forward)
        if not undivided and (of_model := _model_beside(pair, forward)) is not None:
            pair.graph.erase_node(forward.loss)
            return replace(_summed(pair), of_model=of_model)
    original = Original.of(forward)
    forward = write_divisions(forward)
    before, dependences = set(forward.graph.nodes), Dependences(forward)
    forward = replace(forward, of_model=dependences.of_model)
    if dependences.bent is not None:
        raise compares_rows(forward.graph.nodes) or _refused(dependences.bent, BENT_REASON)
    mixed = dependences.of[forward.loss].mixed
    if mixed is not None or dependences.of[forward.loss].terms is None:
        return _beside(_by_trial(forward, dependences, original), adding)
    rewritten = _written(forward, dependences, undivided=undivided)
    trial = LossTrial(
        rewritten,
        [
            *dependences.tail,
            *(n for n in rewritten.graph.nodes if n not in before and n.op != "placeholder"),
        ],
        original,
    )
    if trial.adds_up(rewritten) is False:
        reason = "the loss is not the sum over its rows that it seems to be"
        raise compares_rows(forward.graph.nodes) or _refused(forward.loss, reason)
    return _beside(rewritten, adding)


def over_microbatches(
    forward: Forward, adding: AuxiliaryForm = "", *, scaled: bool = False
) -> Forward:
    """Return the graph with a loss whose mean over microbatches is trained, or a pair of the user's."""
    if forward.weight is not None and scaled:
        return over_whole_batch(forward, adding, scaled=True)
    if forward.weight is not None:
        return _summed(forward)
    return _beside(forward, adding)


def _model_beside(pair: Forward, divided: Forward) -> frozenset[str] | None:
    """Return the names of the model's operations if a pair of the user's is that of the whole batch; None otherwise.

    Its numbers are both sums, or both means. Of a number that Piper does not see into the user says that it is a sum;
    it is tried all the same. `divided` is the graph with the pair as one number.
    """
    assert pair.weight is not None
    dependences = Dependences(divided)
    total, weight = dependences.of[pair.loss], dependences.of[pair.weight]
    alike = total.plain is not None and total.plain == weight.plain
    alike |= total.plain == "mean" and weight.constant
    if not alike:
        known = total.terms is not None and weight.terms is not None
        if known or dependences.bent is not None:
            return None
        trial = LossTrial(divided, dependences.tail, Original.of(divided))
        if trial.adds_up(_summed(pair)) is False:
            return None
    return dependences.of_model


def _summed(pair: Forward) -> Forward:
    return replace(pair, loss_kind="sum", sums=True)


def _divided(forward: Forward) -> Forward:
    """Return the graph with the user's pair as one number."""
    assert forward.weight is not None
    with forward.graph.inserting_before(forward.graph.output_node()):
        build = Builder(forward.graph, forward.loss, Examples())
        return replace(
            forward, loss=build.call(operator.truediv, forward.loss, forward.weight), weight=None
        )


def _beside(forward: Forward, adding: AuxiliaryForm) -> Forward:
    """Return the graph with the loss in the form that it needs beside auxiliary gradients.

    If these are means, the gradient of each microbatch's loss starts from 1, and all gradients are divided by the
    number of microbatches: each gives the weight 1.
    """
    forward = replace(forward, adding=adding, sums=forward.loss_kind != "mean")
    if adding != "mean" or forward.weight is not None:
        return forward
    loss = forward.loss
    with forward.graph.inserting_before(forward.graph.output_node()):
        build, dtype = Builder(forward.graph, loss, Examples()), loss.meta["example_value"].dtype
        if forward.counted is not None:
            count = build.method("select", forward.counted.totals, 0, 0)
            loss = build.call(operator.mul, loss, build.method("to", count, dtype))
        weight = build.call(torch.ones_like, build.method("detach", loss))
    return replace(forward, loss=loss, weight=weight, loss_kind="sum")


def _written(forward: Forward, found: Dependences, *, undivided: bool) -> Forward:
    """Return the graph with the loss in the form that follows from how it depends on the rows.

    If it may not be divided in the end (`undivided`), it reads numbers of the whole batch instead.
    """
    added_up = _added_up(forward, found, undivided=undivided)
    if added_up is not None:
        return added_up
    if any(found.of[d].model for d in _divisors(forward, found)):
        beside = (
            "which it may not beside a scale of the loss, products in float8 or gradients that the model adds"
            if undivided
            else "and has other terms beside"
        )
        raise _refused(forward.loss, f"the loss divides by a number that the model makes, {beside}")
    return Totals(forward, found).written()


def _divisors(forward: Forward, found: Dependences) -> list[fx.Node]:
    return [t.divisor for t in found.of[forward.loss].terms or () if isinstance(t.divisor, fx.Node)]


def _added_up(forward: Forward, found: Dependences, *, undivided: bool) -> Forward | None:
    """Return the graph with the loss as a mean, a sum or a pair; None if it is none of these."""
    terms = found.of[forward.loss].terms or frozenset()
    bases, divisors = {t.base for t in terms}, {t.divisor for t in terms if t.divisor is not None}
    if not divisors and bases <= {"mean", "constant"}:
        return replace(forward, loss_kind="mean")
    if undivided:
        return None
    if not divisors and bases == {"sum"}:
        return replace(forward, loss_kind="total")
    nodes = list(dict.fromkeys(_divisors(forward, found)))
    alone = all(t.divisor is not None or t.base == "constant" for t in terms)
    changed = any(writes(n) for n in found.tail)
    if not alone or len(nodes) != len(divisors) or not same_values(nodes, changed=changed):
        return None
    total, weight = WrittenPair(forward, found.of, nodes).written()
    return replace(forward, loss=total, weight=weight, loss_kind="sum")


def with_metrics_of_batch(forward: Forward) -> Forward:
    """Return the graph with metrics that add up to the metrics of the whole batch, as far as they are understood.

    One that divides a sum by a number of the batch becomes a pair, and one that is a sum is added up. Any other stays a
    mean over microbatches, with a warning if the whole batch has another one.
    """
    weights = {m.name: m.node for m in forward.metrics if m.kind == "metric_weight"}
    for metric in forward.metrics:
        if metric.kind == "metric" and metric.name in weights:
            _look_at_pair(forward, metric, weights[metric.name])
    groups = [[m] if m.name in weights else _metric(forward, m) for m in forward.metrics]
    return replace(forward, metrics=tuple(m for metrics in groups for m in metrics))


def _look_at_pair(forward: Forward, metric: MetricNode, weight: fx.Node) -> None:
    """Warn of a pair of the user's that does not add up to that of the whole batch."""
    pair = replace(forward, loss=metric.node, weight=weight, counted=None)
    divided = _divided(pair)
    if _model_beside(pair, divided) is None:
        forward.warned.append(
            f"metric {metric.name!r}: a number of its pair (sum, weight) is no sum over rows. A step has the quotient of "
            f"both sums over microbatches and replicas, which depends on their number; return sums, without a clamp "
            f"or a constant beside them"
        )
    forward.graph.erase_node(divided.loss)


def _metric(forward: Forward, metric: MetricNode) -> list[MetricNode]:
    alone = replace(forward, loss=metric.node, weight=None, counted=None)
    original = Original.of(alone)
    alone = write_divisions(alone)
    before, dependences = set(alone.graph.nodes), Dependences(alone)
    metric, of_it = replace(metric, node=alone.loss), dependences.of[alone.loss]
    if (
        dependences.bent is not None
        or of_it.mixed is not None
        or of_it.terms is None
        or not of_it.terms
    ):
        return _left(forward, metric, alone, LossTrial(alone, dependences.tail, original))
    added_up = _added_up(alone, dependences, undivided=False)
    if added_up is not None and added_up.loss_kind == "mean":
        return [metric]
    if added_up is None:
        return _left(forward, metric, alone, LossTrial(alone, dependences.tail, original))
    trial = LossTrial(
        added_up,
        [*dependences.tail, *(n for n in added_up.graph.nodes if n not in before)],
        original,
    )
    if trial.adds_up(added_up) is False:
        return _left(forward, metric, alone, trial)
    if added_up.weight is None:
        return [replace(metric, kind="metric_total", node=added_up.loss)]
    return [
        replace(metric, node=added_up.loss),
        replace(metric, kind="metric_weight", node=added_up.weight),
    ]


def _left(
    forward: Forward, metric: MetricNode, alone: Forward, trial: LossTrial
) -> list[MetricNode]:
    """Return a metric as it is; warn unless its mean over microbatches is that of the whole batch by its numbers."""
    if not trial.adds_up(replace(alone, loss_kind="mean")):
        forward.warned.append(
            f"metric {metric.name!r}: it is no mean, sum, or sum divided by a number of the batch. A step has its mean "
            f"over microbatches and replicas, which depends on their number; return a pair of scalars (sum, weight) "
            f"for the quotient of both sums"
        )
    return [metric]


def _by_trial(forward: Forward, found: Dependences, original: Original) -> Forward:
    """Return the graph of a loss that is a mean or a sum by its numbers; refuse another one by name."""
    trial, kinds = LossTrial(forward, found.tail, original), get_args(LossKind)
    unknown = forward.loss if forward.loss not in found.tail else trial.unknown(found.of)
    if unknown is not None:
        raise compares_rows(forward.graph.nodes) or _refused(
            unknown, "makes a number of several rows where Piper does not see how"
        )
    for kind in kinds[0], kinds[-1]:
        if trial.adds_up(candidate := replace(forward, loss_kind=kind)):
            return candidate
    where = found.of[forward.loss].mixed or forward.loss
    reason = "combines rows of the batch, so that the loss is neither a sum nor a mean over rows"
    raise compares_rows(forward.graph.nodes) or _refused(where, reason)


def _refused(node: fx.Node, reason: str) -> CaptureError:
    return CaptureError(f"{line_of(node)}: {reason}. {WAYS_OUT}")
