"""Find the form in which a loss adds up over microbatches to that of the whole batch, or refuse the loss by name."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from torch import fx

from piper_compiler.capture.batch_loss.pairs import Pair, same_values, write_divisions
from piper_compiler.capture.batch_loss.terms import Dependences, writes
from piper_compiler.capture.batch_loss.totals import Totals
from piper_compiler.capture.batch_loss.trial import Trial
from piper_compiler.capture.concrete import line_of
from piper_compiler.capture.dynamo import Forward
from piper_ir.errors import CaptureError
from piper_ir.program import LossKind

WAYS_OUT = (
    "A step computes the loss of some of its rows at a time and adds them up, so the loss must be a sum over rows, a mean over "
    "rows, or such a sum divided by a number of the batch. Accepted is, too, a pair of scalars (sum, weight): the loss of the "
    'whole batch is then the sum of the first divided by the sum of the second. Job(loss_over="microbatch") trains the mean of '
    "the losses of microbatches instead, as gradient accumulation in plain PyTorch does; it then depends on their number"
)


def over_whole_batch(forward: Forward) -> Forward:
    """Return the graph with a loss that adds up over microbatches to the loss of the whole batch.

    A mean over rows stays as it is, and so does a pair of the user's. Raises CaptureError, with the line, for a loss
    that is another function of the rows.
    """
    if forward.weight is not None:
        return replace(forward, loss_kind="sum")
    forward = write_divisions(forward)
    before, found = set(forward.graph.nodes), Dependences(forward)
    mixed = found.of[forward.loss].mixed
    if mixed is not None or found.of[forward.loss].terms is None:
        return _by_trial(forward, found)
    made = _written(forward, found)
    trial = Trial(made, [*found.tail, *(n for n in made.graph.nodes if n not in before and n.op != "placeholder")])
    if trial.adds_up(made, forward.loss) is False:
        raise _refused(forward.loss, "the loss is not the sum over its rows that it seems to be")
    return made


def _written(forward: Forward, found: Dependences) -> Forward:
    """Return the graph with the loss in the form that follows from how it depends on the rows."""
    terms = found.of[forward.loss].terms or frozenset()
    bases, divisors = {t.base for t in terms}, {t.divisor for t in terms if t.divisor is not None}
    if not divisors and bases <= {"mean", "constant"}:
        return replace(forward, loss_kind="mean")
    if not divisors and bases == {"sum"}:
        return replace(forward, loss_kind="total")
    nodes = [d for d in divisors if isinstance(d, fx.Node)]
    alone = all(t.divisor is not None or t.base == "constant" for t in terms)
    changed = any(writes(n) for n in found.tail)
    if alone and len(nodes) == len(divisors) and same_values(nodes, changed=changed):
        total, weight = Pair(forward, found.of, nodes).written()
        return replace(forward, loss=total, weight=weight, loss_kind="sum")
    if any(found.of[d].model for d in nodes):
        raise _refused(forward.loss, "the loss divides by a number that the model makes, and has other terms beside")
    return Totals(forward, found).written()


def _by_trial(forward: Forward, found: Dependences) -> Forward:
    """Return the graph of a loss that is a mean or a sum by its numbers; refuse another one by name."""
    trial, kinds = Trial(forward, found.tail), get_args(LossKind)
    for kind in kinds[0], kinds[-1]:
        if trial.adds_up(made := replace(forward, loss_kind=kind), forward.loss):
            return made
    where = found.of[forward.loss].mixed or forward.loss
    raise _refused(where, "combines rows of the batch, so that the loss is neither a sum nor a mean over rows")


def _refused(node: fx.Node, reason: str) -> CaptureError:
    return CaptureError(f"{line_of(node)}: {reason}. {WAYS_OUT}")
