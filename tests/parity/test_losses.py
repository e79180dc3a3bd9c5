"""Protect that any loss trains the whole batch's numbers under every plan, or is refused by name when it is
compiled."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.api.reference.verification import verify_strategy
from piper_ir.ground.errors import CaptureError
from piper_runtime.rank.batches.feed import Feed
from tests.faults import backward_faults, loss_faults
from tests.helpers import losses, parity
from tests.helpers.cases import each_case

STRATEGIES: dict[str, tuple[dict[str, int], tuple[Any, ...]]] = {
    "pp": ({"pp": 2}, piper.recipes.one_f_one_b(pp=2, microbatches=4)),
    "recompute": (
        {"pp": 2},
        (
            *piper.recipes.one_f_one_b(pp=2, microbatches=4),
            piper.recompute(piper.where(), keep="products"),
        ),
    ),
    "dp": (
        {"dp": 2},
        (*piper.recipes.gpipe(pp=1, microbatches=2), *piper.recipes.data_parallel(zero=3)),
    ),
    "tp": ({"tp": 2}, (piper.shard(piper.where()), piper.split(piper.where(), microbatches=2))),
    "cp": (
        {"cp": 2},
        (
            piper.shard(piper.where(), over="cp", index="tokens"),
            piper.split(piper.where(), microbatches=2),
        ),
    ),
}
NAMES = list(losses.LOSSES)
WEIGHTS = torch.linspace(0.5, 2, losses.CLASSES)
ROW = re.compile(r"^\| (a mean|a pair|totals|refused) \| (.+) \|$", re.MULTILINE)
WORDS = {"mean": "a mean", "sum": "a pair", "total": "totals", "refused": "refused"}


def job(loss: Any, model: Any = losses.Tagger, **more: Any) -> piper.Job:
    given = dict(global_batch=losses.ROWS, precision=piper.Precision("float64")) | more
    return piper.Job(
        model,
        losses.batch,
        loss,
        lambda named: torch.optim.SGD([p for _, p in named], 0.1),
        **given,
    )


def check(made: piper.Job, name: str) -> str:
    """Compare two steps with plain PyTorch on the whole batch; return the kind of the loss."""
    mesh, directives = STRATEGIES[name]
    compiled = piper.compile(made, piper.Strategy(piper.Mesh(**mesh), directives))
    run = piper.execute(compiled, steps=2, launcher="inline", memory=False, gradients=True)
    parity.assert_parity(
        run, parity.reference(made, replicas=compiled.plan.replicas, microbatches=2, steps=2)
    )
    return compiled.plan.loss_kind


@each_case("name", [n for n in NAMES if losses.LOSSES[n][0] == "refused"])
def test_a_loss_that_does_not_add_up_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match=r'losses.py:\d+.*Job\(loss_over="microbatch"\)'):
        check(job(losses.LOSSES[name][1]), "pp")


@each_case("loss", [
    lambda o, t: o[t["mask"]].max(),
    lambda o, t: o[t["mask"]].roll(1, 0).pow(2).mean(),
    lambda o, t: (o[t["mask"]] - o[t["mask"]].mean(0)).pow(2).cumsum(0).mean(),
])  # fmt: skip
def test_another_function_of_selected_rows_is_refused(loss: Any) -> None:
    with pytest.raises(CaptureError, match=r"test_losses.py:\d+.*depends on values"):
        check(job(loss), "pp")


def test_selections_by_two_masks_are_refused_with_the_way_out() -> None:
    with pytest.raises(CaptureError, match="Make a mask once for all tensors"):
        check(job(lambda o, t: F.mse_loss(o[t["y"] >= 0], t["f"][t["y"] >= 0])), "pp")


def drawn(output: Tensor, number: int) -> list[Tensor]:
    return [torch.rand(output.shape[:2]) < 0.5 for _ in range(number)]


def two_masks(output: Tensor, t: Any) -> Tensor:
    first, second = drawn(output, 2)
    return output[first].pow(2).mean() + (output[second] - 1).pow(2).mean()


def test_a_mask_of_random_numbers_is_that_of_one_device() -> None:
    mesh, directives = STRATEGIES["pp"]
    strategy = piper.Strategy(piper.Mesh(**mesh), directives)
    made = job(lambda o, t: o[drawn(o, 1)[0]].pow(2).mean())
    report = verify_strategy(made, strategy, steps=1)
    assert report.equal, report.text()


def test_counts_of_random_numbers_beside_other_terms_are_refused() -> None:
    """Counts are taken before a step begins, and it draws its random numbers later, so that these are others."""
    with pytest.raises(
        CaptureError, match=r"test_losses.py:\d+.*count of random numbers.*Job.batch"
    ):
        check(job(two_masks), "pp")


def quick(name: str, way: str) -> bool:
    """Return whether `make test` has a loss under a kind of plan: the first one of its kind or two."""
    kind = losses.LOSSES[name][0]
    alike = [n for n in NAMES if losses.LOSSES[n][0] == kind]
    return (way, alike.index(name)) in QUICK[kind]


QUICK = {"sum": {("pp", 0), ("cp", 1)}, "total": {("dp", 0), ("recompute", 1)}, "mean": {("tp", 0)}}
"""Kind of a loss -> the kinds of plans that `make test` has it under, with the number of the loss among its kind."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=[pytest.mark.long] * (not quick(name, way)))
        for k, name in enumerate(NAMES)
        for j, way in enumerate(STRATEGIES)
        # two of the five for each loss: the kinds of losses meet all kinds of plans
        if losses.LOSSES[name][0] != "refused"
        and ((j - k) % len(STRATEGIES) < 2 or quick(name, way))
    ],
)
def test_a_loss_trains_the_whole_batch_under_every_kind_of_plan(name: str, way: str) -> None:
    assert check(job(losses.LOSSES[name][1]), way) == losses.LOSSES[name][0]


def test_a_part_of_a_transposed_tensor_is_viewed() -> None:
    """A device's part of [rows, classes, tokens] has other strides, so that a view of the whole needs a copy there."""
    name = "cross_entropy with probabilities as targets"
    assert check(job(losses.LOSSES[name][1]), "cp") == losses.LOSSES[name][0]


@pytest.mark.parametrize(("name", "fault"), [
    ("cross_entropy with ignore_index", loss_faults.miscounted(lambda right, build, y, *_: right(build, y, -1, None))),
    ("cross_entropy with class "
     "weights", loss_faults.miscounted(lambda right, build, y, *_: right(build, y, -100, None))),
    ("cross_entropy plus a mean over "
     "all", loss_faults.miscounted(lambda right, build, y, *_: right(build, y, 0, None))),
    ("cross_entropy with another ignore_index", loss_faults.ignoring(lambda _: -100)),
    ("cross_entropy, all targets count", loss_faults.ignoring(lambda _: 2)),
], ids=["ignored targets", "class weights", "in totals", "given, not read", "read, not given"])  # fmt: skip
def test_a_wrong_count_is_found_when_a_loss_is_compiled(name: str, fault: Any) -> None:
    """The trial compares with the user's own loss, not with one that divides by the same wrong count."""
    with (
        fault,
        backward_faults.nothing_kept(),
        pytest.raises(CaptureError, match="not the sum over its rows that it seems"),
    ):
        check(job(losses.LOSSES[name][1]), "pp")


TEACHER = nn.Linear(losses.CLASSES, losses.CLASSES).double()


def taught(output: Tensor, t: Any) -> Tensor:
    with torch.no_grad():
        wanted = TEACHER(t["f"].double()).softmax(-1)
    return F.kl_div(output.log_softmax(-1), wanted, reduction="batchmean")


def test_a_teacher_that_runs_without_gradients_need_not_be_frozen() -> None:
    assert check(job(taught), "dp") == "mean"
    with pytest.raises(
        CaptureError, match=r"of shape \(7, 7\), which is trained.*requires_grad_\(False\)"
    ):
        check(job(lambda o, t: F.mse_loss(TEACHER(o), t["f"])), "dp")


def test_the_table_of_losses_is_this_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "your_model.md").read_text()
    rows = ROW.findall(text.split("| form | losses |")[1].replace("`", ""))
    said = {name: word for word, names in rows for name in names.split("; ")}
    assert said == {n.replace("`", ""): WORDS[kind] for n, (kind, _) in losses.LOSSES.items()}


@pytest.mark.long
@each_case("name", ["dice", "sqrt(mse_loss)", "rows compared with each other"])
def test_a_refused_loss_is_accumulated_where_the_job_says_so(name: str) -> None:
    made = job(losses.LOSSES[name][1], loss_over="microbatch")
    mesh, directives = STRATEGIES["pp"]
    compiled = piper.compile(made, piper.Strategy(piper.Mesh(**mesh), directives))
    run = piper.execute(compiled, steps=2, launcher="inline", memory=False, gradients=True)
    parity.assert_parity(run, parity.reference(made, microbatches=4, steps=2))
    with pytest.raises(AssertionError):
        parity.assert_parity(
            run, parity.reference(job(losses.LOSSES[name][1]), microbatches=4, steps=2)
        )
    report = verify_strategy(made, compiled.strategy, steps=1)
    assert report.equal and report.equal_whole_batch is False, report.text()


class WithLoss(losses.Tagger):
    """Computes its own loss, with a penalty of its weights and one of its scores."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        scores = super().forward(tokens)
        loss = (
            F.cross_entropy(scores.flatten(0, 1), labels.flatten()) if labels is not None else 0.0
        )
        loss += 0.01 * self.head.weight.pow(2).sum()
        return {"loss": loss + 1e-3 * scores.logsumexp(-1).pow(2).mean(), "scores": scores}


def labelled(step: int, rows: range) -> dict[str, Tensor]:
    tokens, t = losses.batch(step, rows)
    return {"tokens": tokens, "labels": t["y"]}


@pytest.mark.long
@each_case("name", STRATEGIES)
def test_a_model_with_its_own_loss(name: str) -> None:
    made = piper.Job(
        WithLoss, labelled, None, lambda named: torch.optim.SGD([p for _, p in named], 0.1), global_batch=losses.ROWS,
        precision=piper.Precision("float64"),
    )  # fmt: skip
    assert check(made, name) == "total"


class Weighed(WithLoss):
    """Weighs a mean over some targets by a parameter, without a further layer in between."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        scores = losses.Tagger.forward(self, tokens)
        loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten()) * self.scale
        return {"loss": loss, "scores": scores}


def test_a_mean_that_a_parameter_weighs_divides_by_the_count_of_the_batch() -> None:
    made = piper.Job(
        Weighed, labelled, None, lambda named: torch.optim.SGD([p for _, p in named], 0.1), global_batch=losses.ROWS,
        precision=piper.Precision("float64"),
    )  # fmt: skip
    assert check(made, "pp") == "sum"


class Flat(losses.Tagger):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).flatten(0, 1) * self.head.bias


@each_case(("loss", "model", "precision"), [
    (lambda o, t: (o[1:] - o[:-1]).pow(2).mean(), Flat, "float64"),
    (lambda o, t: (o.softmax(0) * t["f"].flatten(0, 1)).mean(), Flat, "float64"),
    (lambda o, t: F.mse_loss(o, t["f"]) + 1e-5 * o.var(), losses.Tagger, "float32"),
], ids=["neighbours among flattened "
        "tokens", "softmax over flattened tokens", "a small variance in float32"])  # fmt: skip
def test_rows_that_meet_are_found_in_any_form(loss: Any, model: Any, precision: str) -> None:
    with pytest.raises(CaptureError, match=r"test_losses.py:\d+"):
        check(job(loss, model, precision=piper.Precision(precision)), "pp")


class Wide(nn.Module):
    """Has so many classes that a loss of its scores is not tried on numbers: rules alone know it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(losses.CLASSES, 2)
        self.head = nn.Linear(2, 2**21, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def halves(o: Tensor, t: Any) -> Tensor:
    """Prefer the answers in the first half of the rows to those in the second."""
    chosen, rejected = o.logsumexp((1, 2)).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


MEETINGS: dict[str, Any] = {
    "halves": halves,
    "neighbours": lambda o, t: (o[1:] - o[:-1]).mean(),
    "neighbours around the end": lambda o, t: (o - o.roll(1, 0)).pow(2).mean(),
    "two halves by a view": lambda o, t: o.view(2, -1, 2**23).prod(0).mean(),
    "another order": lambda o, t: F.mse_loss(o, o[t["length"]].detach()),
    "rows that are gathered": lambda o, t: (o * o.index_select(0, t["length"])).mean(),
    "numbered from the first": lambda o, t: (o.mean((1, 2)) * torch.arange(len(o))).mean(),
    "each with each": lambda o, t: (o[:, 0] @ o[:, 1].T).log_softmax(-1).diagonal().mean(),
}


@pytest.mark.long
@each_case("name", MEETINGS)
def test_rows_that_meet_are_found_without_numbers(name: str) -> None:
    with pytest.raises(
        CaptureError,
        match=r"test_losses.py:\d+.*(combines rows of the|compares the rows of a) batch",
    ):
        piper.compile(job(MEETINGS[name], Wide), piper.Strategy(piper.Mesh(), ()))


def counted(change: Any) -> Any:
    """Return a mean over targets above 4, whose number is changed before it divides."""

    def loss(o: Tensor, t: Any) -> Tensor:
        mask = (t["all"] > 4).to(o)
        return (losses.each(o, t["all"]) * mask).sum() / change(mask.sum())

    return loss


def far(t: Any) -> Tensor:
    return (t["f"] > 9.5).double()


@each_case(
    ("loss", "kind"),
    [
        (lambda o, t: losses.ce(o, t["all"], weight=WEIGHTS.to(o)), "sum"),
        (counted(lambda n: n), "sum"),
        (counted(lambda n: n.clamp(min=1)), "total"),
        (counted(lambda n: n.clamp_(min=9)), "total"),
        (counted(lambda n: torch.clamp_(n, min=1)), "total"),
        (counted(lambda n: n.sqrt_()), "total"),
        (counted(lambda n: n[None].clamp_(min=9)[0]), "refused"),
        (counted(lambda n: n.view(1).add_(1.0)[0]), "refused"),
        (lambda o, t: (o * far(t)).sum() / far(t).sum().view(1).add_(1.0)[0], "refused"),
    ],
)
def test_counts_may_be_cast_like_logits_and_changed_in_place(loss: Any, kind: str) -> None:
    """A trial has targets on both sides of a comparison; else all of a sum were zero, and every mean looked right."""
    with pytest.raises(CaptureError) if kind == "refused" else nullcontext():
        assert check(job(loss), "pp") == kind


@each_case("loss", [
    lambda o, t: losses.ce(o[:, :-1], t["y"][:, 1:]),
    lambda o, t: -(o.log_softmax(-1)[torch.arange(len(o)), 0, t["length"]] * t["mask"][:, 0]).sum() / t["mask"][:, 0].sum(),
], ids=["shifted", "an index that counts rows up"])  # fmt: skip
def test_losses_of_large_vocabularies_are_understood_without_numbers(loss: Any) -> None:
    assert piper.compile(job(loss, Wide), piper.Strategy(piper.Mesh(), ())).plan.loss_kind == "sum"


@pytest.mark.long
def test_totals_of_processes_are_those_of_one_process() -> None:
    made = job(losses.LOSSES["a list of pairs"][1])
    strategy = piper.Strategy(
        piper.Mesh(pp=2, dp=2), (*STRATEGIES["pp"][1], *piper.recipes.data_parallel())
    )
    compiled = piper.compile(made, strategy)
    runs = [
        piper.execute(compiled, steps=3, launcher=where, memory=False)
        for where in ("inline", "processes")
    ]
    assert runs[0].losses == runs[1].losses
    expected = parity.reference(made, replicas=2, microbatches=4, steps=3)
    assert runs[1].losses == pytest.approx(expected.losses, rel=1e-12)


def test_two_roles_count_each_microbatch_once_as_a_step_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loss of DualPipe is on both ends of the pipeline. A rank that counted when it loads its first tensor might
    wait until then for one that waits for its count."""
    begin, uncounted = Feed.begin, list[bool]()

    def counted(feed: Feed, step: int) -> None:
        begin(feed, step)
        uncounted.append(feed.totals.open)

    monkeypatch.setattr(Feed, "begin", counted)
    made = job(losses.LOSSES["several cross_entropies with their own targets"][1])
    strategy = piper.Strategy(piper.Mesh(pp=2), piper.recipes.dualpipe(pp=2, microbatches=4))
    run = piper.execute(
        piper.compile(made, strategy), steps=2, launcher="inline", memory=False, gradients=True
    )
    parity.assert_parity(run, parity.reference(made, microbatches=4, steps=2))
    assert uncounted == [False] * 4


@pytest.mark.long
def test_an_evaluation_has_totals_of_its_own() -> None:
    loss = losses.LOSSES["cross_entropy plus a mean over all"][1]
    made = job(loss, eval_data=losses.batch, eval_every=1, eval_batches=2)
    compiled = piper.compile(made, piper.Strategy(piper.Mesh(pp=2), STRATEGIES["pp"][1]))
    run = piper.execute(compiled, steps=1, launcher="inline", memory=False)
    model = losses.Tagger().double()
    model.load_state_dict(run.state_dict())
    with torch.no_grad():
        plain = [
            float(loss(model(x), {n: _double(t) for n, t in y.items()}))
            for x, y in (losses.batch(k, range(8)) for k in (0, 1))
        ]
    assert run.evaluations[0]["loss"] == pytest.approx(sum(plain) / 2, rel=1e-9)


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def test_a_row_without_targets_counts_for_nothing() -> None:
    """A microbatch whose labels are all ignored has a mean that is not a number, and a sum that is 0."""

    def batch(step: int, rows: range) -> Any:
        tokens, t = losses.batch(step, rows)
        return tokens, {
            **t,
            "y": torch.where(torch.arange(rows.start, rows.stop)[:, None] < 4, -100, t["y"]),
        }

    made = piper.Job(
        losses.Tagger, batch, losses.LOSSES["cross_entropy with ignore_index"][1],
        lambda named: torch.optim.SGD([p for _, p in named], 0.1), global_batch=8, precision=piper.Precision("float64"),
    )  # fmt: skip
    check(made, "pp")


class Judging(losses.Tagger):
    """Return logits, a loss of the model's own, and values that a job's loss does not read."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:  # type: ignore[override]  # it needs labels
        logits = super().forward(tokens)
        made = {
            "logits": logits,
            "own": losses.ce(logits, labels),
            "each": (None, logits.square().mean(-1)),
        }
        return made, logits.sum()


def labelled_pair(step: int, rows: range) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return labelled(step, rows), losses.batch(step, rows)[1]


@pytest.mark.long
@each_case(
    ("loss", "kind"),
    [
        (lambda out, t: out[0]["own"], "sum"),
        (lambda out, t: out[0]["own"] + 0.1 * (out[0]["each"][1] * t["mask"]).mean(), "total"),
        (lambda out, t: losses.ce(out[0]["logits"], t["all"]), "sum"),
    ],
    ids=["the model's", "the model's and another", "another"],
)
def test_a_loss_that_the_model_makes_beside_its_output(loss: Any, kind: str) -> None:
    made = replace(job(loss, Judging), batch=labelled_pair)
    assert check(made, "pp") == check(made, "tp") == kind
