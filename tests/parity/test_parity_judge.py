"""The judge itself must tell right from wrong: rounding passes, and each kind of mistake is found, by name and step."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from piper.api.reference import (
    reference,
    reference_casts,
    reference_float8,
    reference_random,
    reference_scale,
    reference_weights,
)
from tests.helpers import compositions, parity
from tests.helpers.cases import each_case
from tests.helpers.compositions import Composition

GPT = Composition("gpt", microbatches=2)


@pytest.fixture(scope="module")
def truth() -> parity.Reference:
    return compositions.expected(GPT)


def changed(
    truth: parity.Reference, change: Callable[[parity.RunOutcome], object]
) -> list[parity.Difference]:
    """What the judge says of a perfect run to which something was done."""
    outcome = parity.outcome_of(truth)
    found = change(outcome)
    return parity.differences(found if isinstance(found, parity.RunOutcome) else outcome, truth)


def gradients(outcome: parity.RunOutcome, step: int) -> dict[str, torch.Tensor]:
    found = outcome.gradients[0][step]
    assert isinstance(found, dict)
    return found


def test_the_truth_is_equal_to_itself_and_to_itself_with_rounding(truth: parity.Reference) -> None:
    assert changed(truth, lambda outcome: None) == []

    def rounding(outcome: parity.RunOutcome) -> None:
        for step in range(parity.STEPS):
            for name, grad in gradients(outcome, step).items():
                gradients(outcome, step)[name] = grad * (1 + 1e-12) + 1e-15

    assert changed(truth, rounding) == []


def test_gradients_four_times_too_large_are_found_although_the_losses_may_agree(
    truth: parity.Reference,
) -> None:
    def scale(outcome: parity.RunOutcome) -> None:
        for name, grad in gradients(outcome, 0).items():
            gradients(outcome, 0)[name] = 4 * grad

    found = changed(truth, scale)
    assert {d.what for d in found} == {"gradient"} and {d.step for d in found} == {0}
    # The tensors whose true gradient is rounding noise say nothing; every other one is named.
    assert {"embed.weight", "layers.0.qkv.weight", "norm.bias"} <= {d.name for d in found}


def test_float32_is_coarser_but_not_blind(truth: parity.Reference) -> None:
    def judged(scale: float) -> set[str]:
        outcome = parity.outcome_of(truth)
        for name, grad in gradients(outcome, 1).items():
            gradients(outcome, 1)[name] = grad * scale
        return {
            d.name for d in parity.differences(outcome, truth, parity.FLOAT32, parameters=False)
        }

    assert judged(1 + 1e-6) == set()
    assert "layers.0.up.bias" in judged(1 + 1e-4)


def test_a_dropped_gradient_is_found(truth: parity.Reference) -> None:
    found = changed(truth, lambda outcome: gradients(outcome, 1).pop("layers.1.up.bias"))
    assert [(d.step, d.name, d.problem) for d in found] == [
        (1, "layers.1.up.bias", "no rank has one")
    ]


def test_a_gradient_that_one_device_does_not_have_is_found(truth: parity.Reference) -> None:
    found = changed(
        truth,
        lambda outcome: gradients(outcome, 2).update(extra=torch.zeros(3, dtype=torch.float64)),
    )
    assert [(d.step, d.name, d.problem) for d in found] == [(2, "extra", "one device has none")]


def test_a_zero_gradient_in_place_of_a_small_one_is_found(truth: parity.Reference) -> None:
    found = changed(
        truth,
        lambda outcome: gradients(outcome, 0).update(
            {"layers.0.norm1.bias": torch.zeros(16, dtype=torch.float64)}
        ),
    )
    assert [d.name for d in found] == ["layers.0.norm1.bias"]


def test_a_missing_bias_and_a_stale_replica_are_found_in_the_states(
    truth: parity.Reference,
) -> None:
    def lose(outcome: parity.RunOutcome) -> parity.RunOutcome:
        return replace(
            outcome, states={0: {n: t for n, t in outcome.states[0].items() if n != "norm.bias"}}
        )

    assert [(d.what, d.name, d.problem) for d in changed(truth, lose)] == [
        ("parameter", "norm.bias", "no rank holds it")
    ]

    def stale(outcome: parity.RunOutcome) -> parity.RunOutcome:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            initial = dict(compositions.job_of(GPT).model().double().named_parameters())
        return replace(
            outcome, states={0: outcome.states[0], 1: {n: p.detach() for n, p in initial.items()}}
        )

    found = changed(truth, stale)
    assert {d.rank for d in found} == {1} and {d.step for d in found} == {parity.STEPS}


def test_losses_are_compared_to_nine_digits(truth: parity.Reference) -> None:
    found = changed(
        truth,
        lambda outcome: replace(
            outcome, losses=[outcome.losses[0], outcome.losses[1] * (1 + 3e-9), outcome.losses[2]]
        ),
    )
    assert [(d.step, d.what) for d in found] == [(1, "loss")]
    assert (
        changed(
            truth,
            lambda outcome: replace(
                outcome, losses=[loss * (1 + 1e-11) for loss in outcome.losses]
            ),
        )
        == []
    )
    assert changed(truth, lambda outcome: replace(outcome, losses=outcome.losses[:2]))
    assert changed(truth, lambda outcome: replace(outcome, losses=[float("nan")] * 3))


def test_names_shapes_and_dtypes_of_the_state_dict_are_compared(truth: parity.Reference) -> None:
    def rename(outcome: parity.RunOutcome) -> parity.RunOutcome:
        return replace(
            outcome, state_dict={n: t for n, t in outcome.state_dict.items() if n != "head.weight"}
        )

    (found,) = changed(truth, rename)
    assert found.what == "state_dict" and "head.weight" in found.problem  # a tied name counts too

    def narrow(outcome: parity.RunOutcome) -> parity.RunOutcome:
        return replace(outcome, state_dict={n: t.float() for n, t in outcome.state_dict.items()})

    assert all("float32" in d.problem for d in changed(truth, narrow))


def test_the_report_names_the_earliest_step_first_and_counts_the_rest(
    truth: parity.Reference,
) -> None:
    class Wrong:
        losses = [2 * loss for loss in truth.losses]
        rank_gradients = {0: [{n: -g for n, g in grads.items()} for grads in truth.gradients]}
        rank_states = {0: truth.parameters}

        def state_dict(self) -> dict[str, torch.Tensor]:
            return dict(truth.state_dict)

    with pytest.raises(
        AssertionError,
        match=r"(?s)two halves: not what one device computes\n  step 0, loss: .*and \d+ more",
    ) as error:
        parity.assert_parity(Wrong(), truth, label="two halves")
    assert "step 0, gradient of embed.weight on rank 0: |a - b|" in str(error.value)


def test_the_reference_is_not_the_mean_of_microbatch_means() -> None:
    """Three microbatches of uneven weight, one of weight zero: the pair's rule and the naive one differ, so that the
    cases can tell."""
    c = Composition("keywords", microbatches=3, rows=1, optimizer="sgd")
    job = compositions.job_of(c)
    truth = parity.reference(job, microbatches=3, steps=1)
    sums, weights = [], []
    with torch.no_grad():
        torch.manual_seed(0)
        model = job.model().double()
        for row in range(3):
            inputs, targets = job.batch(0, range(row, row + 1))
            total, weight = job.loss(model(**inputs), targets)
            sums.append(float(total))
            weights.append(float(weight))
    assert weights[0] == 0 and weights[1] != weights[2]
    assert truth.losses[0] == pytest.approx(sum(sums) / sum(weights), rel=1e-12)
    naive = sum(s / w for s, w in zip(sums, weights) if w) / 3
    assert abs(truth.losses[0] - naive) > 1e-3


def test_the_reference_draws_by_row_step_and_layer() -> None:
    """Dropout must differ with the job's seed, be the same for any microbatches, and repeat."""
    job = compositions.job_of(Composition("gpt_dropout", microbatches=2))
    first = parity.reference(job, microbatches=2, steps=2)
    assert first.losses == parity.reference(job, microbatches=2, steps=2).losses
    assert first.losses != parity.reference(replace(job, seed=1), microbatches=2, steps=2).losses
    assert first.losses == pytest.approx(
        parity.reference(job, microbatches=1, steps=2).losses, rel=1e-12
    )
    theirs = replace(job, draws="microbatches")
    assert parity.reference(theirs, microbatches=2).losses != parity.reference(theirs).losses
    model = job.model()
    model.eval()
    assert not model.training
    dry = parity.reference(replace(job, model=lambda: job.model().eval()), microbatches=2, steps=2)
    assert first.losses != dry.losses


PARTS = (reference_casts, reference_float8, reference_random, reference_scale, reference_weights)


@each_case(
    ("module", "beside"),
    [(reference, {part.__name__ for part in PARTS}), *((p, set()) for p in PARTS)],
)
def test_the_reference_shares_no_code_with_piper(module: ModuleType, beside: set[str]) -> None:
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    imports = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = {a.name for n in imports if isinstance(n, ast.Import) for a in n.names} | {
        getattr(n, "module", "") or "" for n in imports
    }
    assert "torch" in names
    assert {n for n in names if n.startswith("piper")} == beside
