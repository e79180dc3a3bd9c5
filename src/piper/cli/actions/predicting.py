"""Run `piper simulate`: a prediction, its explanation, and the causes of the difference between two strategies."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from piper.api.captures.capturing import captured_once
from piper.api.compiling.compiling import Compiled, compile
from piper.api.content.origin import save_origin
from piper.api.ground.clusters import cluster_named
from piper.api.ground.costs_file import load_costs
from piper.api.ground.results import (
    new_folder,
    save_explanation,
    save_plan,
    save_prediction,
    save_snapshots,
)
from piper.api.problems.advice import advice
from piper.cli.arguments import SimulateArguments
from piper.cli.given import pairs
from piper.cli.loading import JobFile, load_file
from piper.cli.pipes import show_json
from piper.views.display import show
from piper.views.distribution_table import distribution_table
from piper.views.reporting import report_at_end
from piper.views.why_tables import comparison_tables, why_tables
from piper_autotune import OneWord
from piper_compiler import Options, kernel_source, load_strategy
from piper_ir.ground.errors import JobError, PiperError
from piper_ir.plan.plan import Plan
from piper_ir.program.costs import Costs
from piper_ir.program.ops import KernelSource
from piper_ir.tools import size_text, working
from piper_report import memory_table, prediction_table
from piper_simulator import (
    Cluster,
    GivenLoad,
    Simulation,
    WhatIf,
    Why,
    Zipf,
    compare,
    device_type,
    simulate,
    why,
)

ONE_MORE = "one microbatch more"


@dataclass(frozen=True)
class Target:
    """Say where and how to simulate.

    Attributes:
        file: A file of measured costs.
        contention: Whether instructions that run at the same time share links, SMs and memory.
        load: Of experts, as in `simulate`.
        kernels: As in `piper.Options`, and so is `cuda_graph`; None as the file says.
    """

    name: str
    file: Path | None
    contention: bool = True
    load: GivenLoad | None = None
    kernels: KernelSource | None = None
    cuda_graph: bool = False

    @cached_property
    def cluster(self) -> Cluster:
        return cluster_named(self.name)

    @cached_property
    def costs(self) -> Costs | None:
        return load_costs(self.file) if self.file is not None else None

    def simulated(self, plan: Plan) -> Simulation:
        """Return the simulation of a plan on the target."""
        return simulate(
            plan, self.cluster, costs=self.costs, contention=self.contention, load=self.load
        )

    def compiled(self, job_file: JobFile) -> Compiled:
        return compile(
            job_file.job,
            job_file.strategy,
            costs=self.costs,
            options=self.options(job_file),
        )

    def options(self, job_file: JobFile) -> Options:
        """Return the compiler's options for a file on the target."""
        asked = job_file.asked_options(self.kernels, self.cuda_graph)
        return replace(asked, device=device_type(self.cluster))


def asked_target(a: SimulateArguments) -> Target:
    """Return where and how the options of `piper simulate` say to simulate."""
    load, kernels = load_named(a.load), None if a.kernels is None else kernel_source(a.kernels)
    return Target(a.cluster, a.costs, not a.no_contention, load, kernels, a.cuda_graph)


def load_named(text: str | None) -> GivenLoad | None:
    """Return the load of experts that the command line names: a number, zipf:S, or a file or folder of a run."""
    if text is None:
        return None
    kind, _, s = text.partition(":")
    zipf = kind.lower() == "zipf"
    try:
        number = float(s if zipf else text)
    except ValueError:
        if zipf:
            raise JobError(
                f"--load {text}: zipf:S with a number S from 0 on is needed, such as zipf:0.3"
            ) from None
        if not os.path.exists(text):
            problem = "there is no such file or folder" if text.strip() else "it is empty"
            accepted = "a number such as 1.3, zipf:0.3, or the metrics.jsonl of a run or its folder is accepted"
            raise JobError(f"--load {text!r}: {problem}; {accepted}") from None
        return Path(text)
    return Zipf(number) if zipf else number


@dataclass(frozen=True)
class Noise:
    """Say how durations vary; see `Simulation.distribution`."""

    jitter: float
    repetitions: int
    seed: int

    @staticmethod
    def of(jitter: float | None, repetitions: int | None, seed: int | None) -> Noise | None:
        """Return the noise of the command line; None without --jitter.

        Raises JobError for options that belong to it and are given without it.
        """
        if jitter is not None:
            return Noise(jitter, 200 if repetitions is None else repetitions, seed or 0)
        if repetitions is not None or seed is not None:
            raise JobError(
                "--repetitions and --seed belong to --jitter: say how much durations vary, e.g. --jitter 0.05"
            )
        return None


@dataclass(frozen=True)
class PredictionOutput:
    """Say how a command prints and writes a prediction.

    Attributes:
        out: Results and a report go to a new folder below this one.
        explained: Also explain the time of the step.
        as_json: Print JSON and nothing else.
        noise: How durations vary.
        snapshots: The folder for the memory of each rank.
    """

    out: Path | None = None
    explained: bool = False
    as_json: bool = False
    noise: Noise | None = None
    snapshots: Path | None = None


def simulated(arguments: SimulateArguments) -> None:
    """Simulate one strategy, or two beside each other, as the command line asks for."""
    a = arguments
    target = asked_target(a)
    noise = Noise.of(a.jitter, a.repetitions, a.seed)
    params, changes = pairs(a.params), pairs(a.versus, "--versus")
    shown = PredictionOutput(a.out, a.why, a.as_json, noise, a.memory_snapshot)
    two = a.other is not None or bool(changes)
    if two and shown != PredictionOutput(as_json=shown.as_json):
        raise JobError(
            "--why, --jitter, --memory-snapshot and --out are for one strategy; simulate the two "
            "one after the other"
        )
    job_file = load_file(a.file, params, a.strategy)
    with captured_once():
        if two:
            second, names = _second(job_file, a.other, params, changes)
            predict_two((job_file, second), names, target, as_json=a.as_json)
        else:
            predict(job_file, target, shown)


def predict(job_file: JobFile, target: Target, shown: PredictionOutput) -> None:
    """Simulate a strategy and print the headline and everything else that `shown` asks for, each when it is known."""
    name, noise = job_file.path.stem, shown.noise
    with working("compiling"):
        cluster, compiled = target.cluster, target.compiled(job_file)
    with working("simulating"):
        result = target.simulated(compiled.plan)
    spread = noise and result.distribution(
        noise.jitter, seed=noise.seed, repetitions=noise.repetitions
    )
    folder = (
        new_folder(shown.out, name) if shown.out is not None else None
    )  # what is refused leaves none
    if not shown.as_json:
        show(prediction_table(result, title=f"{name} on {cluster.name}"))
        print()
        show(memory_table(result))
        sys.stdout.flush()  # what follows may take longer than this did
    with working("trying what one word would change"):
        advised = advice(
            job_file.job,
            job_file.strategy,
            cluster,
            target.costs,
            plan=compiled.plan,
            contention=target.contention,
            options=target.options(job_file),
        )
    explanation = explained(job_file, compiled, target, advised.words) if shown.explained else None
    if shown.as_json:
        more: dict[str, Any] = {"distribution": spread.as_dict()} if spread else {}
        more |= {"one_word": [_as_numbers(word) for word in advised.words]}
        if advised.way_out is not None:
            change = advised.way_out.change
            more |= {
                "way_out": {
                    "tried": advised.way_out.tried,
                    "change": None if change is None else _as_numbers(change),
                }
            }
        show_json(result.summary() | more | ({"why": explanation.as_dict()} if explanation else {}))
    else:
        for line in advised.lines(result.period_s):
            print(line)
        for table in ([distribution_table(spread)] if spread else []) + list(
            why_tables(explanation) if explanation else ()
        ):
            print()
            show(table)
    if shown.snapshots is not None:
        print(save_snapshots(shown.snapshots, compiled.plan, result), file=sys.stderr)
    if folder is not None:
        save_plan(folder, compiled.plan, job_file.strategy)
        save_prediction(folder, result, compiled.plan)
        save_origin(folder, job_file.job.seed, job_file.path)
        if explanation is not None:
            save_explanation(folder, explanation, why_tables(explanation))
        report_at_end(folder, compiled.plan)


def explained(
    job_file: JobFile, compiled: Compiled, target: Target, words: Iterable[OneWord]
) -> Why:
    """Return why the step takes as long as it does, with the effects of other words and one more microbatch."""
    with working("explaining"):
        explanation = why(
            compiled.plan,
            target.cluster,
            costs=target.costs,
            contention=target.contention,
            load=target.load,
        )
        more = one_more(job_file, compiled, target, explanation.step_s)
    return replace(
        explanation,
        what_if=(
            *explanation.what_if,
            *(_what_if(word, explanation.step_s) for word in words),
            more,
        ),
    )


def _what_if(word: OneWord, now_s: float) -> WhatIf:
    """Return a row of the what-if table; `now_s` is the present step."""
    sign = "+" if word.bytes_change > 0 else ""
    memory = (
        f"{sign}{size_text(word.bytes_change)} on the fullest device" if word.bytes_change else ""
    )
    return WhatIf(word.words, now_s * (1 + word.step_change), memory)


def _as_numbers(word: OneWord) -> dict[str, Any]:
    before, after = (
        {k: getattr(s, k) for k in ("period_s", "step_s", "device_bytes")}
        for s in (word.before, word.after)
    )
    return {
        "words": word.words,
        "before": before,
        "after": after,
        "fits": not word.after.reason,
        "helps": word.helps,
    }


def one_more(job_file: JobFile, compiled: Compiled, target: Target, now_s: float) -> WhatIf:
    """Return the step with one more microbatch of as many rows, so that the global batch grows by it.

    `now_s` is the present step. The strategy must be a function of a trial, with a parameter that is the number of
    microbatches.
    """
    plan = compiled.plan
    m, each = plan.microbatches, plan.rows * plan.replicas
    job = replace(job_file.job, global_batch=(m + 1) * each)
    reason = "none of the strategy's parameters is the number of microbatches"
    for name in (n for n, value in job_file.params.items() if value == str(m)):
        try:
            strategy = job_file.varied({name: str(m + 1)}, any_value=True)
            more = compile(job, strategy, costs=target.costs).plan
        except PiperError as e:
            reason = str(e)
            continue
        if (more.microbatches, more.rows, more.replicas) != (m + 1, plan.rows, plan.replicas):
            continue
        prediction = simulate(
            more, target.cluster, costs=target.costs, contention=target.contention, load=target.load
        )
        step_s = prediction.step_s
        rate = (
            f"{((m + 1) / m * now_s / step_s - 1) * 100:+.1f} % rows per second" if step_s else ""
        )
        return WhatIf(ONE_MORE, step_s, rate)
    return WhatIf(ONE_MORE, None, reason)


def predict_two(
    sides: tuple[JobFile, JobFile], names: tuple[str, str], target: Target, *, as_json: bool
) -> None:
    """Simulate two strategies and print where the difference arises."""
    explanations = []
    for side in sides:
        plan = target.compiled(side).plan
        explanations.append(
            why(
                plan,
                target.cluster,
                costs=target.costs,
                contention=target.contention,
                load=target.load,
            )
        )
    result = compare(*explanations)
    if as_json:
        show_json({"a": names[0], "b": names[1], **result.as_dict()})
        return
    rows = [side.job.global_batch for side in sides]
    note = f"the steps differ in their rows: {rows[0]} and {rows[1]}" if rows[0] != rows[1] else ""
    for i, table in enumerate(comparison_tables(result, names, target.cluster.name, note)):
        print("\n" * (i > 0), end="")
        show(table)


def _second(
    job_file: JobFile, other: Path | None, params: Mapping[str, str], changes: Mapping[str, str]
) -> tuple[JobFile, tuple[str, str]]:
    """Return the other side of a comparison, and the names of the two.

    `other` is another FILE.py, to which `params` apply too, or a saved strategy of the same job; None is the same file.
    `changes` of parameters make the second strategy.
    """
    name = job_file.path.name
    was = " " * bool(changes) + ", ".join(f"{n}={job_file.params.get(n, '-')}" for n in changes)
    now = " " * bool(changes) + ", ".join(f"{n}={v}" for n, v in changes.items())
    if other is None:
        second = job_file.with_strategy(job_file.varied(changes, flag="--versus"))
        return second, (name + was, name + now)
    if other.suffix != ".json":
        return load_file(other, {**params, **changes}), (
            name + was,
            (other.name if other.name != name else str(other)) + now,
        )
    if changes:
        raise JobError(
            f"--versus changes parameters of a FILE.py; {other} is a saved strategy: leave one of them out"
        )
    return job_file.with_strategy(load_strategy(other)), (name, other.name)
