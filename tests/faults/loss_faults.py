"""Faults in how losses of microbatches become that of the whole batch. tests/faults/mutants.py tries them.

Each compiles or runs a job of tests/helpers/losses.py with a rule changed, and returns the run with what plain PyTorch
computes on the whole batch. Labels are unevenly ignored: microbatches, replicas and steps differ in how many count.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

import piper
from piper import Mesh, Precision, Strategy, models, recipes
from piper.models.jobs import cross_entropy
from piper_capture.store import assemble, tiled_loss
from piper_capture.trace.dynamo import AuxiliaryForm, Forward
from piper_capture.whole_batch.batch_loss import pairs
from piper_capture.whole_batch.batch_loss.totals import Totals
from piper_runtime.rank.batches.batch_totals import BatchTotals
from piper_runtime.rank.binding import parts
from tests.faults.backward_faults import PARTS, judged
from tests.faults.job_faults import JobFault, Judged
from tests.helpers import losses
from tests.helpers.compositions import Composition
from tests.helpers.decoders import DECODERS

REPLICAS = Strategy(
    Mesh(dp=2), (piper.split(piper.where(), microbatches=2), *recipes.data_parallel())
)
ENDS = Strategy(Mesh(pp=2), recipes.dualpipe(pp=2, microbatches=4))
OTHER_IGNORED = "cross_entropy with another ignore_index"
IGNORING, WEIGHED = "cross_entropy with ignore_index", "cross_entropy with class weights"
CLAMPED, BESIDE = (
    "(loss * mask).sum() / mask.sum().clamp(min=1)",
    "cross_entropy plus a mean over all",
)


def _of(c: Composition, name: str, strategy: Strategy = PARTS) -> Judged | None:
    """Train a loss of tests/helpers/losses.py; it has a place in the case whose tolerance is that of float64."""
    if c.model != "gpt" or c.precision != "float64":
        return None
    job = piper.Job(
        losses.Tagger, losses.batch, losses.LOSSES[name][1], lambda named: torch.optim.SGD([p for _, p in named], 0.1),
        global_batch=losses.ROWS, precision=Precision("float64"),
    )  # fmt: skip
    return judged(job, strategy)


def mean_of_microbatch_means(c: Composition) -> Judged | None:
    """A mean over the targets that count is taken for one over rows, and averaged over microbatches."""

    def as_mean(forward: Forward, adding: AuxiliaryForm = "", *, scaled: bool = False) -> Forward:
        return forward

    with mock.patch.object(assemble, "over_whole_batch", as_mean):
        return _of(c, IGNORING)


def miscounted(miscount: Any) -> Any:
    """Let targets be counted by another function, which gets the right one and its arguments."""
    right = pairs._count

    def count(build: Any, target: fx.Node, ignored: int, weight: fx.Node | None) -> fx.Node:
        made: fx.Node = miscount(right, build, target, ignored, weight)
        return made

    return mock.patch.object(pairs, "_count", count)


def ignoring(read: Any) -> Any:
    """Let another target be ignored than a loss says."""
    right = pairs.arguments

    def arguments(node: fx.Node) -> dict[str, Any]:
        given = right(node)
        return {**given, "ignore_index": read(given.get("ignore_index", -100))}

    return mock.patch.object(pairs, "arguments", arguments)


def _unchecked() -> Any:
    """Leave out the trial on numbers, which refuses the loss before anything is trained."""
    return mock.patch(
        "piper_capture.whole_batch.batch_loss.understood.LossTrial.adds_up",
        lambda *_: None,
    )


def ignored_targets_counted(c: Composition) -> Judged | None:
    """Targets that are ignored count in the denominator."""
    with (
        miscounted(lambda right, build, target, ignored, weight: right(build, target, -1, weight)),
        _unchecked(),
    ):
        return _of(c, IGNORING)


def class_weights_not_counted(c: Composition) -> Judged | None:
    """A weighted mean is divided by the number of targets, not by the sum of their weights."""
    with (
        miscounted(
            lambda right, build, target, ignored, weight: right(build, target, ignored, None)
        ),
        _unchecked(),
    ):
        return _of(c, WEIGHED)


def another_ignored(c: Composition) -> Judged | None:
    """The target that a loss ignores is read as the usual one, whatever the loss says."""
    with ignoring(lambda _: -100), _unchecked():
        return _of(c, OTHER_IGNORED)


def constants_whole(c: Composition) -> Judged | None:
    """A mean beside a sum of the whole batch is added in each microbatch, without a share."""
    with mock.patch.object(Totals, "_shared", lambda self, node, value: value), _unchecked():
        return _of(c, BESIDE)


def first_weight_for_all(c: Composition) -> Judged | None:
    """All means of a loss are divided by the weight of the first."""
    right = Totals._reductions

    def of_first(self: Totals) -> Any:
        roots = right(self)
        return [type(r)(r.node, roots[0].start, r.shape, r.mean) for r in roots]

    with mock.patch.object(Totals, "_reductions", of_first), _unchecked():
        return _of(c, "a list of pairs")


def weight_of_one_microbatch(c: Composition) -> Judged | None:
    """The weight of a pair is that of the first microbatch."""
    right = parts._forward

    def forward(run: Any, part: Any, chunk: Any, rank: Any) -> Any:
        found = [v for o, v in zip(chunk.outputs, part.writes) if o.kind == "weight"]

        def zeroed() -> None:
            run()
            for value in found:
                rank.store.values[value].zero_()

        return right(zeroed if part.mb and found else run, part, chunk, rank)

    with mock.patch.object(parts, "_forward", forward):
        return _of(c, IGNORING)


def _read(total: Any) -> Any:
    """Let ranks read another total than that of all ranks."""
    return mock.patch.object(BatchTotals, "of", total)


def own_replica_alone(c: Composition) -> Judged | None:
    """Each replica divides by what it has counted itself."""
    with _read(lambda self, name: self.counted):
        return _of(c, CLAMPED, REPLICAS)


def _first_alone() -> Any:
    """Let the first of the ranks that count be the only one."""
    right = BatchTotals.give

    def give(self: BatchTotals, microbatches: Any) -> None:
        right(self, microbatches if self._rank == self._ranks[0] else lambda: ())

    return mock.patch.object(BatchTotals, "give", give)


def one_replica_alone(c: Composition) -> Judged | None:
    """Only the ranks of the first replica count."""
    with _first_alone():
        return _of(c, CLAMPED, REPLICAS)


def totals_of_the_step_before(c: Composition) -> Judged | None:
    """Each step but the first divides by what was counted in the step before."""
    right, before = BatchTotals.of, dict[int, list[Tensor]]()

    def of(self: BatchTotals, name: str) -> Tensor:
        kept, now = before.setdefault(id(self), []), right(self, name)
        if not kept or not torch.equal(kept[-1], now):
            kept.append(now.clone())
        return kept[-2] if len(kept) > 1 else now

    with _read(of):
        return _of(c, CLAMPED)


def first_microbatch_counted(c: Composition) -> Judged | None:
    """Only the first microbatch is counted in."""
    right = BatchTotals.give

    def give(self: BatchTotals, microbatches: Any) -> None:
        self._own &= {0}
        right(self, microbatches)

    with mock.patch.object(BatchTotals, "give", give):
        return _of(c, CLAMPED)


def one_end_alone(c: Composition) -> Judged | None:
    """Where microbatches end on two devices, as those of DualPipe do, only the first of the two counts."""
    with _first_alone():
        return _of(c, CLAMPED, ENDS)


def _of_tiles(c: Composition) -> Judged | None:
    """Train a decoder with half of the mean as its loss, which is computed in tiles of tokens."""
    if c.model != "gpt" or c.precision != "float64":
        return None
    job = models.job(DECODERS["Mistral"], global_batch=4, precision="float64")
    tiles = (piper.tile_loss(4), piper.split(piper.where(), microbatches=2))
    return judged(replace(job, loss=_half), Strategy(Mesh(), tiles))


def _half(logits: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * cross_entropy(logits, targets)


def gradient_of_the_loss_left_out(c: Composition) -> Judged | None:
    """The backward of tiles takes the gradient of their loss for 1."""
    with mock.patch.object(
        tiled_loss._Tiles, "_scaled", lambda self, node, region: self._unit[node]
    ):
        return _of_tiles(c)


def last_tile_left_out(c: Composition) -> Judged | None:
    """A sum over tiles leaves out the last."""
    right = tiled_loss._Tiles._sum
    with mock.patch.object(
        tiled_loss._Tiles, "_sum", lambda self, terms: right(self, terms[:-1] or terms)
    ):
        return _of_tiles(c)


LOSSES: tuple[JobFault, ...] = (
    mean_of_microbatch_means,
    ignored_targets_counted,
    class_weights_not_counted,
    another_ignored,
    constants_whole,
    first_weight_for_all,
    weight_of_one_microbatch,
    own_replica_alone,
    one_replica_alone,
    totals_of_the_step_before,
    first_microbatch_counted,
    one_end_alone,
)
TILES: tuple[JobFault, ...] = (gradient_of_the_loss_left_out, last_tile_left_out)
