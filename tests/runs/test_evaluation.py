"""Evaluation every k steps and metrics of outputs: any strategy finds what plain PyTorch finds in eval mode."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import piper
from piper.sessions.training import Settings, train
from piper.views.explained.explain import explain
from piper_ir.ground.errors import CaptureError, JobError, PiperWarning
from piper_ir.verify import verify
from piper_report import load
from piper_runtime.engine.memory import Counter
from piper_runtime.launch import RunOptions
from piper_runtime.launch.ground.report import measured_counter
from piper_runtime.launch.running import inline_run
from piper_runtime.rank.binding.evaluation import evaluate
from tests.helpers.cases import each_case
from tests.helpers.evaluated_jobs import (
    CLASSES,
    Net,
    adamw,
    job,
    net,
    normed,
    plain,
    rows_of,
    summed_loss,
)

recipes = piper.recipes
TP = piper.shard(piper.where(), over="tp")
STRATEGIES: dict[str, tuple[piper.Mesh, tuple[Any, ...]]] = {
    "one device": (piper.Mesh(), ()),
    "1F1B and dp": (
        piper.Mesh(pp=2, dp=2),
        (*recipes.one_f_one_b(pp=2, microbatches=4), *recipes.data_parallel()),
    ),
    "interleaved": (piper.Mesh(pp=2), recipes.interleaved(pp=2, microbatches=4)),
    "ZBV": (piper.Mesh(pp=2), recipes.zbv(pp=2, microbatches=4)),
    "DualPipeV": (piper.Mesh(pp=2), recipes.dualpipe_v(pp=2, microbatches=4)),
    "ZeRO 1": (piper.Mesh(dp=2), recipes.data_parallel(zero=1)),
    "ZeRO 3": (
        piper.Mesh(pp=2, dp=2),
        (*recipes.one_f_one_b(pp=2, microbatches=2), *recipes.data_parallel(zero=3)),
    ),
    "states on the host": (
        piper.Mesh(dp=2),
        (*recipes.data_parallel(zero=3), piper.offload(piper.where(), tensors="states")),
    ),
    "tensor parallel": (piper.Mesh(pp=2, tp=2), (TP, *recipes.one_f_one_b(pp=2, microbatches=2))),
    "recomputation": (
        piper.Mesh(pp=2),
        (
            *recipes.one_f_one_b(pp=2, microbatches=2),
            piper.recompute(piper.where(stage=0), keep="products"),
        ),
    ),
}


def close(found: Any, wanted: dict[str, float]) -> bool:
    return found.keys() == wanted.keys() and all(abs(found[k] - wanted[k]) < 1e-9 for k in wanted)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", STRATEGIES)
def test_an_evaluation_is_that_of_plain_pytorch(name: str) -> None:
    mesh, directives = STRATEGIES[name]
    one = job()
    compiled = piper.compile(one, piper.Strategy(mesh, directives))
    assert compiled.evaluation is not None
    verify(compiled.evaluation.plan)
    run = piper.execute(compiled, steps=4, launcher="inline", memory=False)
    assert list(run.evaluations) == [1, 3]
    assert close(run.evaluations[3], plain(one, run.state_dict()))
    assert not close(run.evaluations[1], plain(one, run.state_dict()))


def test_explain_says_of_it_when_and_how_much() -> None:
    strategy = piper.Strategy(piper.Mesh(), ())
    said = "every 2 steps an evaluation of 3 global batches of 8 rows"
    assert f"note: {said}, as in training" in explain(piper.compile(job(), strategy))
    assert said not in explain(
        piper.compile(job(eval_data=None, eval_every=None, eval_batches=None), strategy)
    )


def test_training_is_the_same_with_an_evaluation() -> None:
    mesh, directives = STRATEGIES["1F1B and dp"]
    with_it, without = (
        piper.execute(
            piper.compile(one, piper.Strategy(mesh, directives)),
            steps=4,
            launcher="inline",
            memory=False,
        )
        for one in (job(), job(eval_data=None, eval_every=None, eval_batches=None))
    )
    assert (
        with_it.losses == without.losses
        and with_it.metrics == without.metrics
        and not without.evaluations
    )
    assert all(torch.equal(a, without.state_dict()[n]) for n, a in with_it.state_dict().items())


@pytest.mark.long
def test_losses_with_weights_are_divided_over_the_whole_evaluation() -> None:
    mesh, directives = STRATEGIES["1F1B and dp"]
    one = job(loss=summed_loss)
    run = piper.execute(
        piper.compile(one, piper.Strategy(mesh, directives)),
        steps=2,
        launcher="inline",
        memory=False,
    )
    assert close(run.evaluations[1], plain(one, run.state_dict()))


@pytest.mark.long
def test_batch_norms_take_their_running_averages() -> None:
    one = job(model=normed, batch_norm="microbatch")
    strategy = piper.Strategy(piper.Mesh(pp=2), recipes.one_f_one_b(pp=2, microbatches=2))
    run = piper.execute(piper.compile(one, strategy), steps=2, launcher="inline", memory=False)
    assert close(run.evaluations[1], plain(one, run.state_dict()))


def test_replicas_that_evaluate_with_averages_of_their_own_are_warned_of(
    recwarn: pytest.WarningsRecorder,
) -> None:
    one = job(model=normed, batch_norm="microbatch")
    for dp in (1, 2):
        piper.compile(one, piper.Strategy(piper.Mesh(dp=dp), recipes.data_parallel()))
        said = [w for w in recwarn if "evaluate their rows with buffers" in str(w.message)]
        assert len(said) == dp - 1
    unevaluated = job(model=normed, batch_norm="microbatch").unevaluated
    piper.compile(unevaluated, piper.Strategy(piper.Mesh(dp=2), recipes.data_parallel()))
    assert len([w for w in recwarn if "evaluate their rows" in str(w.message)]) == 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["1F1B and dp", "ZBV", "ZeRO 1", "ZeRO 3", "tensor parallel"])
def test_the_memory_of_an_evaluation_is_that_of_its_plan(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, directives = STRATEGIES[name]
    compiled = piper.compile(job(), piper.Strategy(mesh, directives))
    assert compiled.evaluation is not None
    plan, counters = compiled.evaluation.plan, dict[int, Counter]()

    def measured(evaluation: Any, ranks: Any, run: Any) -> Any:
        engine = run.__closure__[0].cell_contents._engine
        engine.counters = counters
        counters.update({rank.rank: measured_counter(rank) for rank in ranks})
        return evaluate(evaluation, ranks, run)

    monkeypatch.setattr(inline_run, "evaluate", measured)
    piper.execute(compiled, steps=2, launcher="inline", memory=False)
    peaks = {rank: counter.record().peak for rank, counter in counters.items()}
    assert peaks == {rank: plan.role_of(rank).peak_bytes for rank in range(plan.mesh.world)}
    assert all(peak <= compiled.plan.role_of(rank).peak_bytes for rank, peak in peaks.items())


EXPERTS = piper.shard(piper.where(experts=piper.ANY), over="ep", index="experts", stream="rows")
EP = (EXPERTS, *recipes.one_f_one_b(pp=2, microbatches=2), *recipes.data_parallel(over=("ep",)))


@pytest.mark.long
def test_experts_that_devices_share_are_evaluated() -> None:
    config = piper.models.MoEConfig(
        layers=2,
        width=8,
        heads=2,
        kv_heads=1,
        vocab=16,
        length=4,
        hidden=8,
        experts=4,
        top_k=2,
        capacity_factor=None,
    )
    made = piper.models.job(config, global_batch=8, precision="float64")
    one = dataclasses.replace(
        made, eval_data=made.batch, eval_every=1, eval_batches=2, metrics={"right": right}
    )
    alone, shared = (
        piper.execute(piper.compile(one, strategy), steps=2, launcher="inline", memory=False)
        for strategy in (
            piper.Strategy(piper.Mesh(), ()),
            piper.Strategy(piper.Mesh(pp=2, ep=2), EP),
        )
    )
    assert (
        close(shared.evaluations[1], dict(alone.evaluations[1]))
        and shared.evaluations[0] != shared.evaluations[1]
    )


def right(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return (output.argmax(-1) == targets).double().mean()


class Noise(torch.nn.Module):
    """A net of one weight, whose output is noise in both modes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight + torch.rand(x.shape[0], CLASSES)


def mean(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return output.mean()


def test_each_batch_of_an_evaluation_draws_numbers_of_its_own() -> None:
    one = job(model=Noise, metrics={"mean": mean}, eval_every=1)
    found = [
        piper.execute(
            piper.compile(
                dataclasses.replace(one, eval_batches=batches), piper.Strategy(piper.Mesh(), ())
            ),
            steps=1,
            launcher="inline",
        ).evaluations[0]["mean"]
        for batches in (1, 2)
    ]
    assert abs(found[0] - found[1]) > 1e-6


def failing(step: int, rows: range) -> Any:
    x, y = rows_of(step, rows)
    return (x, y) if step == 0 else (x[:1], y[:1])


def test_an_error_says_that_it_is_of_an_evaluation() -> None:
    compiled = piper.compile(job(eval_data=failing), piper.Strategy(piper.Mesh(), ()))
    with pytest.raises(
        JobError, match=r"in an evaluation, batch 1: Job.eval_data\(step=1, .* of shape \(1, 16\)"
    ):
        piper.execute(compiled, steps=2, launcher="inline")


@pytest.mark.long
def test_modules_are_metrics_of_outputs() -> None:
    """The call of a module accepts anything, so that it would be taken for a function of the loss."""
    one = job(metrics={"cross": torch.nn.CrossEntropyLoss()})
    run = piper.execute(
        piper.compile(one, piper.Strategy(piper.Mesh(), ())), steps=2, launcher="inline"
    )
    assert run.metrics[1]["cross"] == pytest.approx(run.losses[1])
    assert run.evaluations[1]["cross"] == pytest.approx(run.evaluations[1]["loss"])


@pytest.mark.long
def test_functions_of_the_loss_get_that_of_the_evaluation() -> None:
    """They are in the run and in `on_step`; one that fails is left out, and training goes on."""
    one = job(metrics={"perplexity": math.exp, "root": lambda loss: math.sqrt(-loss)})
    heard: list[Any] = []
    with pytest.warns(PiperWarning, match="metric 'root' failed on an evaluation: ValueError"):
        run = piper.execute(
            piper.compile(one, piper.Strategy(piper.Mesh(), ())),
            steps=2,
            launcher="inline",
            on_step=heard.append,
        )
    assert run.evaluations == {
        1: {"loss": run.evaluations[1]["loss"], "perplexity": math.exp(run.evaluations[1]["loss"])}
    }
    assert [record.evaluation for record in heard] == [{}, run.evaluations[1]]


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["processes", pytest.param("ray", marks=pytest.mark.long)])
def test_processes_find_what_one_process_finds(launcher: str) -> None:
    mesh, directives = STRATEGIES["1F1B and dp"]
    compiled = piper.compile(job(), piper.Strategy(mesh, directives))
    here, there = (
        piper.execute(compiled, steps=3, launcher=name, memory=False, checkpoint=None)
        for name in ("inline", launcher)
    )
    assert list(there.evaluations) == [1] and close(there.evaluations[1], dict(here.evaluations[1]))
    assert there.metrics == here.metrics and there.losses == here.losses


class Counting(Net):
    """A net whose forward counts its calls in any mode."""

    def __init__(self) -> None:
        super().__init__(False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return super().forward(x)


class OtherHead(Net):
    """A net that has a head more in training mode."""

    def __init__(self) -> None:
        super().__init__(False)
        self.second = torch.nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (self.second(x) if self.training else 0.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Counting, "in eval mode forward still changes the buffer 'calls'"),
        (OtherHead, "other parameters .*second.bias"),
    ],
)
def test_models_whose_eval_mode_does_not_fit_are_refused(model: Any, said: str) -> None:
    compiled = piper.compile(job(model=model, metrics={}), piper.Strategy(piper.Mesh(), ()))
    with pytest.raises(JobError, match=rf"Job\(eval_data=...\).*{said}"):
        piper.execute(compiled, steps=1, launcher="inline")


DATA = torch.utils.data.TensorDataset(*rows_of(7, range(8)))


@each_case(
    ("fields", "said"),
    [
        (dict(eval_every=None), "when to evaluate is not known; give eval_every"),
        (dict(eval_data=None), r"eval_every=2\): it is for an evaluation; give eval_data"),
        (dict(eval_every=0), "an integer of at least 1"),
        (dict(eval_batches=True), "an integer of at least 1"),
        (dict(eval_batches=None), "the length of a batch function is not known; give eval_batches"),
        (
            dict(eval_data=iter([]), eval_batches=None),
            "got a list_iterator, which has no samples by number; .* batch function",
        ),
        (dict(metrics={"loss": mean}), "'loss', the name of something that is logged"),
        (dict(metrics={"f1": lambda a, b, c: a}), r"f1\(loss\) or f1\(output, targets\)"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match=said):
        job(**fields)


def test_a_dataset_is_evaluated_whole_or_refused() -> None:
    assert job(eval_data=DATA, eval_batches=None).evaluated.eval_batches == 1
    with pytest.raises(
        JobError,
        match=r"8 samples, which is no multiple of the global batch of 6 .* eval_batches=1",
    ):
        _ = job(eval_data=DATA, eval_batches=None, global_batch=6).evaluated
    with pytest.raises(JobError, match="has 1 global batches of 8 rows"):
        _ = job(eval_data=DATA, eval_batches=2).evaluated
    with pytest.raises(JobError, match="8 samples, fewer than one global batch of 16 rows"):
        _ = job(eval_data=DATA, eval_batches=None, global_batch=16).evaluated


@each_case(
    ("metric", "said"),
    [
        (
            lambda output, targets: output,
            r"'bad' returned a tensor of shape \[rows, 5\]; a scalar is needed",
        ),
        (lambda output, targets: "good", "'bad' returned an object of type str"),
        (lambda output, targets: (output.sum(), 1, 2), "a pair"),
        (
            lambda output, targets: output[0, 0].item(),
            "a size or Python number depends on values of tensors",
        ),
    ],
)
def test_metrics_that_are_no_means_are_refused(metric: Any, said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        piper.compile(job(metrics={"bad": metric}), piper.Strategy(piper.Mesh(), ()))


@each_case(
    ("metric", "depends"),
    [
        (right, False),
        (
            lambda output, targets: (
                (output.topk(2, -1).indices == targets[:, None]).any(-1).double().mean()
            ),
            False,
        ),
        (lambda output, targets: (output.sum(), (targets > 1).sum()), False),
        (lambda output, targets: (output.sum(), targets.numel()), False),
        (lambda output, targets: (output.sum(), (targets > 1).sum().clamp(min=1)), True),
        (lambda output, targets: torch.nn.functional.cross_entropy(output, targets).exp(), True),
        (lambda output, targets: output.square().mean().sqrt(), True),
        (lambda output, targets: output.abs().max(), True),
    ],
)
def test_a_metric_that_depends_on_the_plan_is_warned_of(metric: Any, depends: bool) -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        piper.compile(job(metrics={"it": metric}), piper.Strategy(piper.Mesh(), ()))
    said = [str(w.message) for w in heard if "metric 'it'" in str(w.message)]
    assert len(said) == depends and all("over microbatches and replicas" in one for one in said)


def test_results_are_in_the_folder_and_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(
        job(),
        piper.Strategy(piper.Mesh(pp=2), recipes.one_f_one_b(pp=2, microbatches=2)),
        RunOptions(steps=4, launcher="inline"),
        Settings(folder=tmp_path),
    )
    said = capsys.readouterr().out
    assert "evaluation every 2 steps: 3 batches of 8 rows" in said and "eval_loss" in said
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert ["eval_loss" in line for line in lines] == [False, True, False, True]
    last = lines[-1]
    assert (
        last["eval_perplexity"] == pytest.approx(math.exp(last["eval_loss"]))
        and 0 <= last["eval_accuracy"] <= 1
    )
    assert (
        last["metrics"]["perplexity"] == pytest.approx(math.exp(last["loss"]))
        and "accuracy" in last["metrics"]
    )
    found = load(tmp_path)
    assert (
        found.metrics[-1].evaluation["loss"] == last["eval_loss"]
        and not found.metrics[0].evaluation
    )
    page = (tmp_path / "report" / "report.html").read_text()
    assert "In evaluation" in page and "eval accuracy" in page
    assert (
        "Why the predicted step takes as long as it does" in page
        and "critical path" in page.lower()
    )


@pytest.mark.long
def test_the_example_of_the_job_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "your_model.md").read_text()
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "eval_every" in block
    ]
    strategy = piper.Strategy(piper.Mesh(pp=2), recipes.one_f_one_b(pp=2, microbatches=2))
    given = dict(
        piper=piper,
        math=math,
        nn=torch.nn,
        model=net,
        adamw=adamw,
        training=DATA,
        held_out=DATA,
        strategy=strategy,
    )
    exec(code, given)
    trained, loss, evaluated = map(float, capsys.readouterr().out.split())
    assert 0 <= trained <= 1 and 0 <= evaluated <= 1 and loss > 0
