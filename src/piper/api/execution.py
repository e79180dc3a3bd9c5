"""Run a compiled strategy on a launcher."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piper.api.compiling import Compiled, check_separable
from piper.api.metrics import check_logs, recorded
from piper.api.results import hang_report, new_folder, save_run, unless_empty
from piper_ir.errors import JobError, OutputError, PiperWarning, PlanError
from piper_ir.keywords import check_keywords, checked_call

if TYPE_CHECKING:
    from piper_runtime import Job, Run
    from piper_runtime.launch import StepRecord
    from piper_simulator import Cluster


def check_same_job(compiled: Compiled, job: Job) -> None:
    """Raise JobError when a job differs from the compiled one in facts of the plan, which would be ignored silently."""
    for name in ("model", "loss", "clip_norm", "precision", "tokens_per_row"):
        ours, theirs = getattr(compiled.job, name), getattr(job, name)
        if ours is not theirs and ours != theirs:
            raise JobError(
                f"execute: the job's {name} is {theirs!r}, but the strategy was compiled for {ours!r}; compile it with this job"
            )
    if job is not compiled.job:
        from piper_runtime.rank import optimizer_spec

        check_separable(optimizer_spec(job, compiled.program.params), compiled.plan)


def check_same_program(compiled: Compiled) -> None:
    """Raise PlanError when a plan is not of the program beside it: its rules may hold, with other results."""
    plan, program = compiled.plan, compiled.program
    bound = tuple(replace(b, spec=b.spec.bind(plan.rows)) for b in program.batch)
    coords = {c.id: c.coords for c in program.chunks}  # directives add coordinates, and change nothing else of a chunk
    chunks = tuple(replace(c, coords={k: v for k, v in c.coords.items() if k in coords.get(c.id, ())}) for c in plan.chunks)
    tables: dict[str, tuple[Any, Any]] = {
        "program_key": (plan.program_key, program.key),
        "loss_kind": (plan.loss_kind, program.loss_kind),
        "params": (plan.params, program.params),
        "buffers": (plan.buffers, program.buffers),
        "batch": (plan.batch, bound),
        "chunks": (chunks, program.bound(plan.rows)),
    }
    for name, (ours, theirs) in tables.items():
        if ours != theirs:
            raise PlanError(f"execute: the plan's {name} {_difference(ours, theirs)}; compile the strategy with this job")


def _difference(ours: Any, theirs: Any) -> str:
    """Return where two tables of a plan and of its program differ."""
    if not isinstance(ours, tuple):
        return f"is {ours!r}, that of its program is {theirs!r}"
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            fields = [f.name for f in dataclass_fields(one) if getattr(one, f.name) != getattr(other, f.name)]
            name = getattr(one, "id", "") or one.name
            return f"differ from those of its program: {', '.join(fields)} of {name}"
    return f"are {len(ours)}, its program has {len(theirs)}"


@checked_call(JobError)
def execute(
    compiled: Compiled,
    job: Job | None = None,
    *,
    steps: int,
    launcher: str = "ray",
    cluster: str | Cluster | None = "auto",
    timeout_s: float = 60,
    trace: bool = False,
    memory: bool = True,
    out: str | Path | None = None,
    folder: Path | None = None,
    log: Iterable[str] = (),
    on_step: Callable[[StepRecord], object] | None = None,
    **more: Any,
) -> Run:
    """Run a compiled strategy for `steps` optimizer steps.

    Args:
        compiled: What `compile` returned.
        job: Replaces the compiled job. It has the same model, loss and optimizer groups, but may have other data,
            another seed or learning rate.
        steps: Optimizer steps to run.
        launcher: "ray" (one actor per rank), "processes" (torch.distributed, one process per rank; under torchrun this
            process is one of them), "inline" (all ranks in this process), or "emulated" (no job, memory or losses:
            sleeps of the time that `cluster` would take, see `piper.api.emulation.emulate`).
        cluster: For "ray", "auto" (a cluster that is there, else this machine) or the address HOST:PORT of one to join.
        timeout_s: Seconds without progress of any rank after which the run ends.
        trace: Record the last step's spans.
        memory: Measure peak bytes in the second step, or in the only one. It slows that step.
        out: Losses, times, metrics and trace go to a new folder below this one. On a hang every rank's last
            instructions go there too, as hang.txt.
        folder: As `out`, but into this folder itself.
        log: Logs of steps beside metrics.jsonl while the run goes on: "tensorboard", "wandb".
        on_step: Called with every finished step, a `StepRecord` of `piper_runtime`.
        more: Other keywords of `piper_runtime.execute`.

    Raises JobError, ExecutionError (rank, node, instruction, peer), HangError, NonFiniteLossError, MissingPackageError.
    """
    from piper_compiler.capture import check_autocast
    from piper_ir.verify import verify
    from piper_runtime import execute as run
    from piper_runtime.launch import check_request, is_first

    if launcher == "emulated":
        from piper.api.emulation import emulate

        check_keywords("execute", more, [*_EXECUTE, *inspect.signature(emulate).parameters], JobError)
        if log or on_step is not None:
            raise JobError('execute(launcher="emulated"): nothing is trained, so there are no steps for log and on_step')
        return emulate(compiled, steps=steps, cluster=cluster, timeout_s=timeout_s, trace=trace, out=out, **more)
    check_keywords("execute", more, [*_EXECUTE, *inspect.signature(run).parameters], JobError)
    chosen = job or compiled.job
    if chosen is None or compiled.code is None:
        raise JobError("execute: this was compiled from a Program, which has no code and no data; compile a piper.Job to run it")
    if cluster != "auto" and launcher != "ray":
        raise JobError(
            f'execute(cluster={cluster!r}): launcher "{launcher}" runs on this machine; launcher="ray" takes an address, '
            'launcher="emulated" any cluster to imitate'
        )
    check_autocast()
    check_logs(log)
    check_same_job(compiled, chosen)
    check_same_program(compiled)
    check_request(compiled.plan, chosen, steps, launcher, timeout_s)
    verify(compiled.plan)  # a directive of the user's may have made a plan that would hang
    if not is_first():  # under torchrun one of the ranks writes for all
        folder, out, log = None, None, ()
    folder = new_folder(Path(out), "run") if out is not None else folder
    codes = [c.code for c in compiled.plan.chunks]
    code = compiled.code.export(codes, compiled.plan.rows)
    options: dict[str, Any] = dict(
        steps=steps, launcher=launcher, cluster=cluster, timeout_s=timeout_s, trace=trace, memory=memory
    )
    options |= {"trainable": compiled.trainable}
    with unless_empty(folder), hang_report(folder), recorded(folder, log, compiled.plan, on_step) as heard:
        result = run(compiled.plan, code, chosen, on_step=heard, **options, **more)
    if folder is not None:
        try:
            save_run(folder, result, compiled.plan.tokens_per_step)
        except OutputError as e:  # what was trained is worth more than its report
            warnings.warn(f"{e}. The run is complete, but its report is not", PiperWarning, stacklevel=2)
    return result


_EXECUTE = [name for name in inspect.signature(execute).parameters if name != "more"]
