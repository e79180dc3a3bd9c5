"""A checkpoint of another training, and data or settings that cannot be gone on with, are named; small changes warn."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from packages.runtime.tests.chains import chain, run
from packages.runtime.tests.handmade import adamw, batch
from packages.runtime.tests.test_checkpoint_resume import Named, halved, of_torch, plain, same
from piper_ir.ground.errors import JobError, OutputError, PiperWarning
from piper_runtime import Checkpoints
from piper_runtime.checkpoint import saved_run
from piper_runtime.checkpoint.saved_run import open_checkpoint
from piper_runtime.rank.optimizers.optimizer_calls import advance
from tests.helpers.cases import each_case


class Counting(torch.optim.SGD):
    """Keeps a number in its groups and one for each parameter, as optimizers outside of torch do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            group["rounds"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as torch's
        for group in self.param_groups:
            group["rounds"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["seen"] = state.get("seen", 0) + 1
                    p.sub_(p.grad / (group["rounds"] + state["seen"]))


class Hoarding(Counting):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as torch's
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["history"] = [1, {2}]


def test_an_optimizer_of_ones_own_goes_on_with_its_numbers(tmp_path: Path) -> None:
    plan, job = chain(pp=1, microbatches=1, optimizer=lambda named: Counting([p for _, p in named]))
    whole = run(plan, job, steps=5)
    run(plan, job, steps=3, checkpoint=Checkpoints(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PiperWarning)
        assert same(
            whole, run(plan, job, steps=2, checkpoint=Checkpoints(tmp_path), resume="latest")
        )
    plan, job = chain(pp=1, microbatches=1, optimizer=lambda named: Hoarding([p for _, p in named]))
    with pytest.raises(
        JobError,
        match=r"the optimizer keeps a list as 'history' of parameter .*run without checkpoints",
    ):
        run(plan, job, checkpoint=Checkpoints(tmp_path / "other"))


@each_case(
    ("changed", "says"),
    [
        (
            dict(seed=4),
            "was made with seed=3, the job has 4; use the same, or to start another training",
        ),
        (dict(optimizer=adamw), "holds the state of SGD, the job has AdamW"),
        (
            dict(optimizer=plain),
            "the optimizer kept momentum_buffer, with this job's settings it keeps nothing",
        ),
        (dict(layers=4), "has no parameter 'layers.3', which the model has; use the same model"),
        (dict(layers=2), "has 'layers.2', which the model has not; use the same model"),
        (dict(rows=4), "was made with global_batch=8, the job has 16"),
    ],
)
def test_another_training_is_named(changed: dict[str, Any], says: str, tmp_path: Path) -> None:
    plan, job = chain()
    run(plan, job, steps=2, checkpoint=Checkpoints(tmp_path))
    plan, job = chain(**changed)
    with pytest.raises(JobError, match=says):
        run(plan, job, resume=tmp_path / "step-00000002")


def test_settings_for_which_an_optimizer_keeps_more_are_named(tmp_path: Path) -> None:
    """Also where it runs on parameters one by one, and would miss a tensor in its next step."""
    plan, job = chain(optimizer=of_torch("RMSprop"))
    run(plan, job, steps=2, checkpoint=Checkpoints(tmp_path))
    plan, job = chain(
        optimizer=lambda named: torch.optim.RMSprop([p for _, p in named], lr=0.01, centered=True)
    )
    with pytest.raises(
        JobError,
        match="the optimizer kept square_avg, step, with this job's settings it keeps grad_avg, square_avg",
    ):
        run(plan, job, resume=tmp_path / "step-00000002")


def swapped(named: Named) -> torch.optim.Optimizer:
    """The same groups as `adamw`, with the other parameters."""
    optimizer = adamw(named)
    first, second = optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]
    return optimizer


def in_one(named: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize(
    ("other", "says"),
    [(swapped, "group 1, with parameter"), (in_one, "group 0, with parameter 'head'")],
)
def test_parameters_of_other_groups_are_a_warning(other: Any, says: str, tmp_path: Path) -> None:
    plan, job = chain(optimizer=adamw)
    run(plan, job, steps=2, checkpoint=Checkpoints(tmp_path))
    plan, job = chain(optimizer=other)
    with pytest.warns(PiperWarning) as said:
        run(plan, job, steps=1, resume=tmp_path / "step-00000002")
    assert any(says in str(w.message) for w in said)


class Unnamed:
    """A batch function that says where it goes on."""

    goes_on = -1

    def state_dict(self, step: int) -> dict[str, Any]:
        return {"rows": 8 * step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.goes_on = state["rows"]

    def __call__(self, step: int, rows: range) -> Any:
        return batch(step, rows)


class Data(Unnamed):
    """One that says what its data are, too."""

    follows_state = ("sizes",)

    def __init__(self, name: str, sizes: int = 1) -> None:
        self.name, self.sizes = name, sizes

    def fingerprint(self) -> dict[str, Any]:
        return {"name": self.name, "sizes": self.sizes}


def test_data_that_say_what_they_are_go_on_and_others_are_named(tmp_path: Path) -> None:
    plan, job = chain(batch=Data("a"))
    run(plan, job, steps=2, checkpoint=Checkpoints(tmp_path))
    same_data = Data("a", sizes=2)
    assert (
        run(plan, chain(batch=same_data)[1], steps=1, resume=tmp_path / "step-00000002").first_step
        == 2
    )
    assert same_data.goes_on == 16
    with pytest.raises(
        JobError, match=r"was made with other data \(name 'a' -> 'b'\); use the same"
    ):
        run(plan, chain(batch=Data("b"))[1], resume=tmp_path / "step-00000002")
    with pytest.raises(JobError, match=r"was made with other data \(.* -> None\)"):
        run(plan, chain()[1], resume=tmp_path / "step-00000002")


class Broken(Data):
    """A batch function one of whose methods fails."""

    def __init__(self, method: str) -> None:
        super().__init__("a")
        setattr(self, method, self.fail)

    def fail(self, *_: Any) -> Any:
        raise ValueError("no such file")


def test_a_state_is_kept_without_a_fingerprint(tmp_path: Path) -> None:
    data = Unnamed()
    plan, job = chain(batch=data)
    run(plan, job, steps=2, checkpoint=Checkpoints(tmp_path))
    run(plan, job, steps=1, resume=tmp_path / "step-00000002")
    assert data.goes_on == 16


@each_case("method", ["fingerprint", "state_dict", "load_state_dict"])
def test_a_method_of_the_data_that_fails_is_named(method: str, tmp_path: Path) -> None:
    plan, job = chain(batch=Data("a"))
    run(plan, job, steps=2, checkpoint=Checkpoints(tmp_path))
    with pytest.raises(
        JobError,
        match=rf"Job\.batch\.{method}\(.*\) raised ValueError: no such file "
        rf".*test_checkpoint_refused",
    ):
        run(
            plan,
            chain(batch=Broken(method))[1],
            steps=1,
            resume="latest",
            checkpoint=Checkpoints(tmp_path),
        )


def test_data_that_json_does_not_hold_are_named(tmp_path: Path) -> None:
    data: Any = Data("a")
    data.name = float("nan")
    plan, job = chain(batch=data)
    with pytest.raises(JobError, match=r"cannot be saved.*give texts, numbers"):
        run(plan, job, steps=1, checkpoint=Checkpoints(tmp_path))


def test_another_learning_rate_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, job = chain(scheduler=halved)
    run(plan, job, steps=2, checkpoint=Checkpoints(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(plan, job, steps=1, resume=tmp_path / "step-00000002")
    state = open_checkpoint(tmp_path / "step-00000002").meta.schedule_state
    assert (state["last_epoch"], state["step_size"]) == (2, 2)
    monkeypatch.setattr(saved_run, "advance", lambda schedule, steps: advance(schedule, steps - 1))
    with pytest.warns(PiperWarning) as said:
        run(plan, job, steps=1, resume=tmp_path / "step-00000002")
    assert "schedule goes on with other settings" in str(
        said[0].message
    ) and "last_epoch=1 for 2" in str(said[0].message)
    monkeypatch.undo()
    _, faster = chain(scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.9))
    with pytest.warns(
        PiperWarning,
        match=r"group 0 goes on with other settings than the checkpoint .* in step 2: lr=0.09.* "
        r"for 0.05",
    ):
        run(plan, faster, steps=1, resume=tmp_path / "step-00000002")


@each_case(
    ("options", "says"),
    [
        (
            dict(resume="latest"),
            "resume='latest' needs the folder of the checkpoints: give checkpoint=Checkpoints",
        ),
        (dict(resume="nowhere"), "resume='nowhere': there is no such folder"),
        (dict(resume=3), "resume=3: 'latest' or the path of a checkpoint is needed"),
        (dict(checkpoint="folder"), r"checkpoint='folder': piper.Checkpoints\(folder\) is needed"),
        (dict(first_step=-1), "first_step=-1: an integer of at least 0"),
        (dict(first_step=True), "first_step=True: an integer of at least 0"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, Any], says: str) -> None:
    plan, job = chain()
    with pytest.raises(JobError, match=says):
        run(plan, job, **options)


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    plan, job = chain(pp=1, microbatches=1)
    with pytest.raises(
        JobError, match="holds no complete checkpoint; leave resume out to start from step 0"
    ):
        run(plan, job, checkpoint=Checkpoints(tmp_path), resume="latest")
    run(plan, job, steps=4, checkpoint=Checkpoints(tmp_path, every=2))
    with pytest.raises(
        JobError,
        match=r"holds a checkpoint of step 4, and this run begins with step 0: give a folder of "
        r"its own",
    ):
        run(plan, job, checkpoint=Checkpoints(tmp_path))
    with pytest.raises(
        JobError, match=r"holds 2 checkpoints; give one of them, such as .*step-00000004"
    ):
        run(plan, job, resume=tmp_path)
    with pytest.raises(JobError, match="goes on with step 2; leave first_step out"):
        run(plan, job, resume=tmp_path / "step-00000002", first_step=3)
    (tmp_path / "file").write_text("")
    with pytest.raises((OutputError, JobError), match="file"):
        run(plan, job, checkpoint=Checkpoints(tmp_path / "file" / "below"))


@each_case(
    ("fields", "says"),
    [
        (dict(folder=""), r"Checkpoints\(folder=''\): the path of a folder is needed"),
        (dict(folder="x", every=0), r"Checkpoints\(every=0\): an integer of at least 1 is needed$"),
        (
            dict(folder="x", keep=0),
            r"Checkpoints\(keep=0\): an integer of at least 1 is needed, or None to keep all",
        ),
        (
            dict(folder="x", asynchronous=1),
            r"Checkpoints\(asynchronous=1\): True or False is needed",
        ),
        (dict(folder="x", evry=3), r"did you mean 'every'\?"),
    ],
)
def test_settings_that_cannot_be(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        Checkpoints(**fields)
