"""A run that goes on from a checkpoint does what it would have done without the pause; what differs is named."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from packages.runtime.tests.chains import chain, run
from packages.runtime.tests.handmade import adamw, batch
from piper_ir.ground.errors import ExecutionError, JobError, OutputError, PiperWarning
from piper_runtime import Checkpoints, Run
from piper_runtime.checkpoint import commits, saved_run
from piper_runtime.checkpoint.saved_run import open_checkpoint
from piper_runtime.checkpoint.settings import complete_checkpoints
from piper_runtime.launch.ground.report import StepRecord
from piper_runtime.launch.processes.processes import Pool
from piper_runtime.rank.optimizers.optimizer import RankOptimizer
from piper_runtime.rank.optimizers.optimizer_calls import advance
from piper_runtime.weights.marker import MARKER

Named = list[tuple[str, nn.Parameter]]


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def warm(optimizer: torch.optim.Optimizer) -> Any:
    """Two schedules behind each other; the first one changes the rate relative to what it is."""
    first = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    return torch.optim.lr_scheduler.SequentialLR(
        optimizer, [first, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)], [4]
    )


def damped(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9, dampening=0.5)


def plain(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def amsgrad(named: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.01, amsgrad=True)


def of_torch(name: str) -> Callable[[Named], torch.optim.Optimizer]:
    return lambda named: getattr(torch.optim, name)([p for _, p in named], lr=0.01)


CASES: dict[str, dict[str, Any]] = {
    "one rank, momentum": dict(pp=1, microbatches=1, scheduler=halved),
    "tied, adamw in two groups": dict(tied=True, optimizer=adamw, scheduler=warm, clip_norm=0.05),
    "dp and dropout": dict(dp=2, drop=True, optimizer=adamw),
    "masked": dict(masked=True, dp=2, tied=True, scheduler=halved),
    "dampening": dict(optimizer=damped),
    "no state": dict(optimizer=plain),
    "amsgrad": dict(optimizer=amsgrad),
    "adafactor": dict(optimizer=of_torch("Adafactor")),
    "asgd": dict(optimizer=of_torch("ASGD")),
    "nadam": dict(optimizer=of_torch("NAdam"), scheduler=halved),
    "rprop": dict(optimizer=of_torch("Rprop")),
}


def same(a: Run, b: Run) -> bool:
    """Whether `b` is the end of `a`, to the bit."""
    x, y = a.state_dict(), b.state_dict()
    return (
        a.losses[b.first_step :] == b.losses
        and x.keys() == y.keys()
        and all(torch.equal(x[n], y[n]) for n in x)
    )


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_has_the_bits_of_one_without_a_pause(name: str, tmp_path: Path) -> None:
    plan, job = chain(**CASES[name])
    whole = run(plan, job, steps=6)
    run(plan, job, steps=3, checkpoint=Checkpoints(tmp_path))
    found = run(plan, job, steps=3, checkpoint=Checkpoints(tmp_path), resume="latest")
    assert found.first_step == 3 and found.trace.step == 5
    assert same(whole, found)
    assert all(
        torch.equal(g[n], whole.gradients[3 + k][n])
        for k, g in enumerate(found.gradients)
        for n in g
    )


def test_steps_carry_their_number(tmp_path: Path) -> None:
    """Rows, random numbers and the schedule are those of the step, also where weights are given by hand."""
    plan, job = chain(pp=2, drop=True, optimizer=plain, scheduler=halved)
    whole, begin = run(plan, job, steps=6), run(plan, job, steps=3)
    torch.save(begin.state_dict(), tmp_path / "weights.pt")
    steps: list[StepRecord] = []
    _, later = chain(
        pp=2, drop=True, optimizer=plain, scheduler=halved, init=tmp_path / "weights.pt"
    )
    found = run(plan, later, steps=3, first_step=3, on_step=steps.append, memory=True)
    assert same(whole, found) and [s.step for s in steps] == [3, 4, 5]
    assert found.peak_bytes == run(plan, job, steps=3, memory=True).peak_bytes, (
        "memory is measured in the second step"
    )
    assert not same(whole, run(plan, later, steps=3, first_step=2)), (
        "control: other rows, masks and rates"
    )


def test_control_a_schedule_or_a_seed_that_is_off_by_one_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, job = chain(drop=True, scheduler=halved)
    whole = run(plan, job, steps=6)
    run(plan, job, steps=3, checkpoint=Checkpoints(tmp_path))
    resume = complete_checkpoints(tmp_path)[3]
    assert same(whole, run(plan, job, steps=3, resume=resume))
    made = RankOptimizer.__init__
    with monkeypatch.context() as m:
        m.setattr(RankOptimizer, "__init__", lambda self, *a: made(self, *a[:-1], a[-1] - 1))
        assert not same(whole, run(plan, job, steps=3, resume=resume))
    with monkeypatch.context() as m:
        from piper_runtime.rank.values import rng

        seed = rng.rng_seed
        m.setattr(rng, "rng_seed", lambda s, step, *more: seed(s, step - 1, *more))
        assert not same(whole, run(plan, job, steps=3, resume=resume))


def test_processes_save_and_resume_as_one_process_does(pool: Pool, tmp_path: Path) -> None:
    plan, job = chain(pp=2, dp=2, optimizer=adamw, scheduler=halved)
    options: dict[str, Any] = dict(launcher="processes", pool=pool)
    whole = run(plan, job, steps=5, **options)
    run(plan, job, steps=3, checkpoint=Checkpoints(tmp_path, every=2), **options)
    assert list(complete_checkpoints(tmp_path)) == [2, 3]
    steps: list[StepRecord] = []
    found = run(
        plan,
        job,
        steps=2,
        checkpoint=Checkpoints(tmp_path, every=2),
        resume="latest",
        on_step=steps.append,
        memory=True,
        **options,
    )
    assert same(whole, found) and [s.step for s in steps] == [3, 4] and found.peak_bytes
    assert list(complete_checkpoints(tmp_path)) == [3, 4, 5]
    again = run(plan, job, steps=1, resume=tmp_path / "step-00000004")
    assert again.losses == pytest.approx(whole.losses[4:], rel=1e-12)
    run(
        plan,
        job,
        steps=6,
        checkpoint=Checkpoints(tmp_path / "sync", every=4, asynchronous=False),
        **options,
    )
    assert list(complete_checkpoints(tmp_path / "sync")) == [4, 6]


def test_checkpoints_are_made_where_they_are_due_and_old_ones_go(tmp_path: Path) -> None:
    plan, job = chain(pp=1, microbatches=1)
    run(plan, job, steps=9, checkpoint=Checkpoints(tmp_path, every=2, keep=3))
    assert list(complete_checkpoints(tmp_path)) == [6, 8, 9] and len(list(tmp_path.iterdir())) == 3
    run(
        plan,
        job,
        steps=5,
        checkpoint=Checkpoints(tmp_path / "all", every=1, keep=None, asynchronous=False),
    )
    assert list(complete_checkpoints(tmp_path / "all")) == [1, 2, 3, 4, 5]


def test_what_has_no_marker_is_not_resumed_from(tmp_path: Path) -> None:
    plan, job = chain(pp=1, microbatches=1)
    run(plan, job, steps=4, checkpoint=Checkpoints(tmp_path, every=2))
    (tmp_path / "step-00000004" / MARKER).unlink()
    found = run(
        plan,
        job,
        steps=1,
        checkpoint=Checkpoints(tmp_path / "new"),
        resume=tmp_path / "step-00000002",
    )
    assert found.first_step == 2
    with pytest.raises(
        JobError,
        match=r"step-00000004 is a checkpoint that was not completed: it has no complete.json",
    ):
        run(plan, job, resume=tmp_path / "step-00000004")
    assert (
        run(plan, job, steps=3, checkpoint=Checkpoints(tmp_path), resume="latest").first_step == 2
    )
    for folder in complete_checkpoints(tmp_path).values():
        (folder / MARKER).unlink()
    with pytest.raises(
        JobError,
        match=r"no complete checkpoint, only incomplete ones \(step-00000002, .*leave resume out",
    ):
        run(plan, job, checkpoint=Checkpoints(tmp_path), resume="latest")


def test_a_run_that_fails_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    def broken(step: int, rows: range) -> Any:
        if step == 2:
            raise ValueError("no more data")
        return batch(step, rows)

    plan, job = chain(pp=2, batch=broken)
    with pytest.raises(Exception, match="no more data"):
        run(plan, job, steps=4, checkpoint=Checkpoints(tmp_path, every=1))
    assert [p.name for p in sorted(tmp_path.iterdir())][:1] == ["step-00000001"]
    assert all((p / MARKER).is_file() for p in tmp_path.iterdir())


def test_a_killed_rank_leaves_checkpoints_that_another_strategy_goes_on_from(
    tmp_path: Path,
) -> None:
    """Rank 1 is killed as it gets step 3's rows, in step 3 or one ahead; what was completed is good, and nothing else
    is left."""
    once = tmp_path / "killed"

    def deadly(step: int, rows: range) -> Any:
        if step == 3 and rows.start == 4 and not once.exists():
            once.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        return batch(step, rows)

    plan, job = chain(pp=1, dp=2, microbatches=2, batch=deadly, optimizer=adamw)
    settings = Checkpoints(tmp_path / "saved", every=1, keep=None)
    with pytest.raises(ExecutionError, match=r"rank 1 was killed by SIGKILL.* in step [23]"):
        run(plan, job, steps=6, launcher="processes", checkpoint=settings)
    done = [*complete_checkpoints(tmp_path / "saved")]
    assert once.exists() and done in ([1], [1, 2], [1, 2, 3])
    assert {p.name for p in (tmp_path / "saved").iterdir()} == {f"step-0000000{n}" for n in done}
    other, same_job = chain(pp=2, microbatches=4, optimizer=adamw)
    whole = run(other, same_job, steps=6)
    found = run(other, same_job, steps=6 - done[-1], checkpoint=settings, resume="latest")
    assert found.losses == pytest.approx(whole.losses[done[-1] :], rel=1e-12)


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    plan, job = chain()
    saved = Checkpoints(tmp_path, every=1, asynchronous=False)

    def another(record: StepRecord) -> None:
        with pytest.raises(
            JobError,
            match=r"another run is writing its checkpoints to .*give each run a folder of its own",
        ):
            run(plan, job, steps=1, checkpoint=saved, resume="latest" if record.step else None)
        tried.append(record.step)

    tried: list[int] = []
    run(plan, job, steps=2, checkpoint=saved, on_step=another)
    assert tried == [0, 1] and list(complete_checkpoints(tmp_path)) == [1, 2]
    assert run(plan, job, steps=1, checkpoint=saved, resume="latest").first_step == 2, (
        "it is free again"
    )


def test_a_killed_runs_rests_are_cleared_up(tmp_path: Path) -> None:
    plan, job = chain(pp=1, microbatches=1)
    (tmp_path / "step-00000007.partial").mkdir(parents=True)
    (tmp_path / "step-00000007.partial" / "__0_0.distcp").write_bytes(b"half")
    run(plan, job, steps=1, checkpoint=Checkpoints(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_write_that_fails_is_a_warning_and_older_checkpoints_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from piper_runtime.checkpoint import rank_saver

    plan, job = chain(pp=2)
    run(plan, job, steps=2, checkpoint=Checkpoints(tmp_path, keep=1))
    monkeypatch.setattr(rank_saver, "write_boxes", _full_disk)
    with pytest.warns(
        PiperWarning,
        match=r"checkpoint of step 4 could not be written: rank 0: .*No space left.*training goes "
        r"on",
    ):
        found = run(plan, job, steps=2, checkpoint=Checkpoints(tmp_path, keep=1), resume="latest")
    assert len(found.losses) == 2 and [p.name for p in tmp_path.iterdir()] == ["step-00000002"]


def test_an_old_checkpoint_that_cannot_be_deleted_is_not_a_new_one_that_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def held(folder: Path) -> None:
        raise OSError(f"{folder.name} is in use")

    plan, job = chain(pp=2)
    monkeypatch.setattr(commits, "delete", held)
    with pytest.warns(PiperWarning) as caught:
        run(plan, job, steps=2, checkpoint=Checkpoints(tmp_path, every=1, keep=1))
    assert [str(w.message) for w in caught] == [
        "the checkpoint of step 2 is complete, but an older one could not be deleted: "
        "step-00000001 is in use; "
        "training goes on"
    ]
    assert list(complete_checkpoints(tmp_path)) == [1, 2]
    assert (
        run(plan, job, steps=1, checkpoint=Checkpoints(tmp_path), resume="latest").first_step == 2
    )


def test_control_a_checkpoint_that_lacks_a_part_is_never_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from piper_runtime.checkpoint import rank_saver

    plan, job = chain(pp=2)
    shares = rank_saver.saved_portion
    monkeypatch.setattr(
        rank_saver,
        "saved_portion",
        lambda plan, rank: replace(shares(plan, rank), buffers=frozenset()),
    )
    with pytest.raises(
        ExecutionError, match=r"the ranks together have not written all of model.count after step 3"
    ):
        run(plan, job, checkpoint=Checkpoints(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def heard() -> Iterator[None]:
    """Let this process hear an interrupt, also where it was started to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_an_interrupted_run_saves_the_step_that_it_ends_with(tmp_path: Path) -> None:
    plan, job = chain(pp=2, optimizer=adamw)
    settings = Checkpoints(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(
            plan,
            job,
            steps=5,
            checkpoint=settings,
            on_step=lambda r: signal.raise_signal(signal.SIGINT) if r.step == 2 else None,
        )
    assert list(complete_checkpoints(tmp_path)) == [3]
    assert same(
        run(plan, job, steps=5), run(plan, job, steps=2, checkpoint=settings, resume="latest")
    )


def _full_disk(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_a_mistake_in_the_thread_that_writes_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from piper_runtime.checkpoint import rank_saver

    monkeypatch.setattr(rank_saver, "write_boxes", lambda *_: 1 / 0)
    plan, job = chain(pp=1, microbatches=1)
    with pytest.raises(ZeroDivisionError):
        run(plan, job, checkpoint=Checkpoints(tmp_path))
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize(
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
        match="the optimizer kept square_avg, step, with this job's settings it keeps grad_avg, "
        "square_avg",
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


@pytest.mark.parametrize("method", ["fingerprint", "state_dict", "load_state_dict"])
def test_a_method_of_the_data_that_fails_is_named(method: str, tmp_path: Path) -> None:
    plan, job = chain(batch=Data("a"))
    run(plan, job, steps=2, checkpoint=Checkpoints(tmp_path))
    with pytest.raises(
        JobError,
        match=rf"Job\.batch\.{method}\(.*\) raised ValueError: no such file "
        rf".*test_checkpoint_resume",
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


@pytest.mark.parametrize(
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
        JobError, match="holds no complete checkpoint, none; leave resume out to start from step 0"
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


@pytest.mark.parametrize(
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
