"""Write folders of results, with plans, traces and numbers; no run overwrites another.

A folder holds the files of its command; `piper report` shows them.

- plan.json, strategy.json: the plan and the strategy that were simulated or run. `piper_ir.plan.plan_file` reads a
  plan, which is written as tables if it is large.
- predicted.json: `Simulation.summary()` and `ranks`, per rank bubble_s, peak_bytes, device_bytes, peak_by_category
  and limit_bytes, the memory of its device.
  Of more than 16 ranks it has `roles` instead, each with the `ranks` that it holds for.
- origin.json: machine, versions, commit, seed, time and command.
- answer.json: the ranked strategies of `piper plan`.
- why.json: the tables and numbers of `piper simulate --why`, also for the prediction of a run.
- measured.json: losses, step_s, batch_s, period_s, tokens_per_s, peak_bytes by rank; of an interrupted run
  steps_asked, which it was to take.
- spans-predicted.json, spans-measured.json: a `piper_ir.ground.trace.Trace`.
- trace-predicted.json, trace-measured.json: the same for Chrome's viewer.
- weights.pt: the model's state_dict after the last step of `piper run`.
- metrics.jsonl: one object per step.
- restarts.jsonl: one object per failure after which a run went on, written when it happens. measured.json has the same
  at the end, with the seconds that each took.
- hang.txt: where every rank was when a run hung.
- study.json, costs.json: of a tuning and of a profile.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piper_ir.ground.errors import HangError, OutputError, PiperWarning
from piper_ir.plan.plan import Plan
from piper_ir.tools import write_whole

if TYPE_CHECKING:
    from piper_compiler import Strategy
    from piper_ir.ground.trace import Trace
    from piper_report import Table
    from piper_runtime import Run
    from piper_runtime.launch import Restart
    from piper_simulator import Simulation, Why


WEIGHTS = "weights.pt"


def new_folder(out: Path, name: str) -> Path:
    """Make a new folder NAME-001, NAME-002, ... below `out`; raise OutputError when it cannot be made."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        endings = [p.name.rpartition("-")[2] for p in out.glob(f"{name}-*")]
        number = (
            max([int(e) for e in endings if re.fullmatch(r"\d{1,18}", e, re.ASCII)], default=0) + 1
        )
        while True:
            folder = out / f"{name}-{number:03d}"
            try:
                folder.mkdir()
            except FileExistsError:  # another run took the number meanwhile
                number += 1
                continue
            return folder
    except OSError as e:
        raise OutputError(
            f"cannot make a folder for results in {out}: {e.strerror}; choose another with --out"
        ) from None


def made_folder(folder: Path) -> Path:
    """Make a folder for results unless it is there; raise OutputError when it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise OutputError(
            f"cannot make the folder {folder} for results: {e.strerror}; choose another"
        ) from None
    return folder


@contextmanager
def unless_empty(folder: Path | None) -> Iterator[None]:
    """Remove a folder for results again when the code inside of the `with` fails before it has written any."""
    try:
        yield
    except BaseException:
        if folder is not None and folder.is_dir():
            files = [*folder.iterdir()]
            if all(f.is_file() and not f.stat().st_size for f in files):
                for file in files:
                    file.unlink()
                folder.rmdir()
        raise


def save_plan(folder: Path, plan: Plan, strategy: Strategy) -> None:
    """Write plan.json and strategy.json; raise OutputError when a file cannot be written."""
    from piper_ir.plan.plan_file import plan_text

    with writing(folder):
        write_whole(folder / "plan.json", plan_text(plan))
        write_whole(folder / "strategy.json", strategy.dumps())


def save_explanation(folder: Path, explanation: Why, tables: Iterable[Table]) -> None:
    """Write why.json: the tables as they are printed, and the numbers; raise OutputError when it cannot be written."""
    shown = [_saved(table) for table in tables]
    with writing(folder):
        write_whole(
            folder / "why.json",
            json.dumps({"tables": shown, "numbers": explanation.as_dict()}),
        )


def save_answer(folder: Path, table: Table) -> None:
    """Write answer.json: the ranked strategies as they are printed; raise OutputError when it cannot be written.

    The words below a row are its second column there.
    """
    rows = tuple(
        (row[0], words, *row[1:]) for row, words in zip(table.rows, table.below, strict=True)
    )
    columns = (table.columns[0], "strategy", *table.columns[1:])
    with writing(folder):
        whole = _saved(replace(table, columns=columns, rows=rows))
        write_whole(folder / "answer.json", json.dumps(whole))


def _saved(table: Table) -> dict[str, Any]:
    return {name: getattr(table, name) for name in ("title", "columns", "rows", "notes")}


def save_prediction(folder: Path, prediction: Simulation, plan: Plan) -> None:
    """Write predicted.json, spans-predicted.json and trace-predicted.json.

    Ranks that do the same at the same times are written once if there are many. Raises OutputError when a file cannot
    be written.
    """
    from piper_ir.ground.codec import dumps
    from piper_report import write_chrome

    many, trace = len(prediction.bubble_s) > MOST_RANKS, written_trace(prediction)
    ranks = {"roles": _by_role(prediction)} if many else {"ranks": _by_rank(prediction)}
    with writing(folder):
        write_whole(
            folder / "predicted.json",
            json.dumps(prediction.summary() | ranks, indent=None if many else 1),
        )
        write_whole(folder / "spans-predicted.json", dumps(trace))
        write_chrome(trace, folder / "trace-predicted.json", plan)


MOST_RANKS = 16
"""The most ranks that are written one by one, which is the form that programs read."""


def written_trace(prediction: Simulation) -> Trace:
    """Return the trace for files and programs: rank by rank, or once for alike ranks if there are many."""
    return prediction.role_trace if len(prediction.bubble_s) > MOST_RANKS else prediction.trace


def _by_role(prediction: Simulation) -> list[dict[str, Any]]:
    """Return the entries of `_by_rank`, each once with all its ranks."""
    by_rank = _by_rank(prediction)
    return [{"ranks": list(ranks)} | by_rank[ranks[0]] for ranks in prediction.role_trace.alike]


def _by_rank(prediction: Simulation) -> list[dict[str, Any]]:
    p = prediction
    columns = zip(
        p.bubble_s,
        p.peak_bytes,
        p.device_bytes,
        map(dict, p.peak_by_category),
        p.limit_bytes,
        p.host_bytes,
        strict=True,
    )
    names = (
        *("bubble_s", "peak_bytes", "device_bytes", "peak_by_category", "limit_bytes"),
        "host_bytes",
    )
    return [dict(zip(names, numbers, strict=True)) for numbers in columns]


def save_snapshots(folder: Path, plan: Plan, prediction: Simulation) -> str:
    """Write the predicted memory of ranks as rank0.pickle, ... for torch's memory visualiser; return where they are.

    Only the first rank that runs a program is written. Raises OutputError when a file cannot be written.
    """
    with writing(folder, "--memory-snapshot"):
        folder.mkdir(parents=True, exist_ok=True)
        for role in plan.roles:
            blob = pickle.dumps(
                prediction.memory_snapshot(role.ranks[0]), protocol=4
            )  # which the visualiser reads
            write_whole(folder / f"rank{role.ranks[0]}.pickle", blob)
    ranks = ", ".join(
        f"rank{r.ranks[0]}" + (f" (and {len(r.ranks) - 1} like it)" if r.ranks[1:] else "")
        for r in plan.roles[:4]
    )
    more = f" and {len(plan.roles) - 4} more" if plan.roles[4:] else ""
    return f"memory of {ranks}{more} is in {folder}: drop a file onto pytorch.org/memory_viz"


def save_run(folder: Path, run: Run, plan: Plan, asked: int | None = None) -> None:
    """Write measured.json, and the two files of spans when spans were recorded.

    `asked` are the steps that an interrupted run was to take. Raises OutputError when a file cannot be written.
    """
    from piper_ir.ground.codec import dumps
    from piper_report import write_chrome

    with writing(folder):
        tokens = plan.tokens_per_step
        rate = tokens / run.period_s if tokens and run.period_s else None
        times = {
            "step_s": run.step_s,
            "batch_s": run.batch_s,
            "period_s": run.period_s,
            "tokens_per_s": rate,
        }
        numbers: dict[str, Any] = {
            "losses": run.losses,
            **times,
            "peak_bytes": dict(run.peak_bytes),
            **failures(run),
            **({} if asked is None else {"steps_asked": asked}),
        }
        write_whole(folder / "measured.json", json.dumps(numbers, indent=1))
        if run.trace.spans:
            write_whole(folder / "spans-measured.json", dumps(run.trace))
            # A run that lost devices may have gone on under another plan, which is not known here.
            own = plan if run.trace.plan_key == plan.key else None
            write_chrome(run.trace, folder / "trace-measured.json", own)


def failures(run: Run) -> dict[str, Any]:
    """Return the failures after which a run went on, as measured.json has them; nothing for a run without any."""
    return {"restarts": [asdict(failure) for failure in run.restarts]} if run.restarts else {}


def save_weights(folder: Path, state: Mapping[str, Any]) -> Path:
    """Write a state_dict as weights.pt, for `torch.load(..., weights_only=True)` and Job(init=...); return its path.

    Raises OutputError when it cannot be written; an older file then stays as a whole.
    """
    import torch

    path = folder / WEIGHTS
    unfinished = path.with_name(f"{WEIGHTS}.unfinished")
    with writing(folder):
        try:
            torch.save(dict(state), unfinished)
            unfinished.replace(path)
        except RuntimeError as e:  # torch's own class for a disk that is full
            raise OSError(0, str(e).splitlines()[0]) from e
        finally:
            unfinished.unlink(missing_ok=True)
    return path


def restart_log(
    folder: Path | None, also: Callable[[Restart], object] | None
) -> Callable[[Restart], object] | None:
    """Return a function that writes a failure after which a run goes on into its folder, and calls another one."""
    if folder is None:
        return also

    def noted(restart: Restart) -> None:
        try:
            with (folder / "restarts.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(restart)) + "\n")
        except OSError as e:  # the run is worth more
            warnings.warn(
                f"restarts.jsonl in {folder} cannot be written: {e.strerror}",
                PiperWarning,
                stacklevel=2,
            )
        if also is not None:
            also(restart)

    return noted


@contextmanager
def hang_report(folder: Path | None) -> Iterator[None]:
    """Write every rank's last instructions to hang.txt if the run inside hangs; the error says so."""
    try:
        yield
    except HangError as e:
        if folder is None:
            raise
        where = f"every rank's last instructions are in {folder / 'hang.txt'}"
        try:
            write_whole(folder / "hang.txt", e.report)
        except OSError as full:  # the hang is what matters
            where = f"{folder / 'hang.txt'} cannot be written: {full.strerror}"
        raise HangError(f"{e}; {where}", e.report) from None


@contextmanager
def writing(folder: Path, flag: str = "--out") -> Iterator[None]:
    """Raise OutputError, which names the folder, for a file that cannot be written inside of the `with`."""
    try:
        yield
    except OSError as e:
        raise OutputError(
            f"cannot write results to {folder}: {e.strerror}; choose another folder with {flag}"
        ) from None
