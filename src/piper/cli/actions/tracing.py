"""Run `piper trace`: where the time of profiled steps went, and how that compares with a plan."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from piper.api.compiling.compiling import compile
from piper.api.ground.clusters import cluster_named
from piper.api.ground.results import made_folder, save_plan, save_prediction, writing
from piper.cli.given import pairs
from piper.cli.loading import JobFile, load_file
from piper.cli.pipes import show_json
from piper.cli.trace_options import TraceArguments
from piper.views.display import show
from piper.views.trace_tables import (
    breakdown_tables,
    differences,
    instruction_seconds,
    instruction_table,
    message_tables,
    straggler_table,
)
from piper_ir.ground.codec import dumps
from piper_ir.ground.errors import FormatError, JobError, PiperWarning
from piper_ir.program.costs import Origin
from piper_ir.tools import machine_name, write_whole
from piper_report import Table, write_chrome
from piper_simulator import (
    CostModel,
    DeviceModel,
    Simulation,
    Work,
    device_type,
    model_for,
    simulate,
)
from piper_traces import (
    Matched,
    MatchedMessages,
    RankEvents,
    breakdown,
    match_messages,
    match_ranges,
    measured_costs,
    read_ranks,
    stragglers,
)


def traced(arguments: TraceArguments) -> None:
    """Print the tables, and write costs and folder if asked; raise FormatError for a file that is no trace."""
    a = arguments
    of_a_plan = ("--calibrate", a.calibrate), ("--out", a.out), ("-p", a.params)
    for option, value in (*of_a_plan, ("--strategy", a.strategy)):
        if value and a.job is None:
            raise JobError(f"{option} needs the plan that was traced: give --job FILE.py")
    ranks = read_ranks(a.files)
    parts = [breakdown(rank, a.step) for rank in ranks]
    spread = stragglers(ranks, a.step) if len(ranks) > 1 else []
    tables = [*breakdown_tables(parts), *([straggler_table(spread)] if spread else [])]
    facts: dict[str, Any] = {
        "ranks": [asdict(part) for part in parts],
        "stragglers": [asdict(one) for one in spread],
    }
    if a.job is not None:
        more, about = _Beside(a, ranks, load_file(a.job, pairs(a.params), a.strategy)).compared()
        tables += more
        facts |= about
    if a.as_json:
        show_json(facts)
        return
    for k, table in enumerate(tables):
        print(end="\n" if k else "")
        show(table)


class _Beside:
    """Hold traces beside the plan that they are of."""

    def __init__(
        self, arguments: TraceArguments, ranks: Sequence[RankEvents], file: JobFile
    ) -> None:
        cluster = cluster_named(arguments.cluster)
        options = replace(file.options, device=device_type(cluster))
        self._asked, self._ranks, self._cluster = arguments, ranks, cluster
        self._strategy = file.strategy
        self._plan = compile(file.job, file.strategy, options=options).plan
        self._predicted: Simulation = simulate(self._plan, cluster)
        self._model: CostModel = model_for(self._plan, cluster, None, DeviceModel)

    def compared(self) -> tuple[list[Table], dict[str, Any]]:
        """Return tables and facts: by the names of instructions if the trace has them, else by its messages."""
        a, names = self._asked, {i.name for _, _, i in self._plan.instructions()}
        if any(r.name in names for rank in self._ranks for r in rank.ranges):
            matched = match_ranges(self._plan, self._ranks, a.step)
            self._write(matched)
            return self._by_instruction(matched)
        for option, value in (("--calibrate", a.calibrate), ("--out", a.out)):
            if value:
                raise FormatError(
                    f"{option}: the trace has no ranges named as the plan's instructions, so that it says no "
                    f"durations of them; `piper run FILE.py --profiler DIR` writes such traces"
                )
        found = match_messages(self._plan, self._work(), self._ranks, a.step)
        return list(message_tables(found)), {"messages": _message_facts(found)}

    def _work(self) -> dict[int, list[Work]]:
        """Return the work of each instruction of the traced ranks."""
        ranks = [r.rank for r in self._ranks if 0 <= r.rank < self._plan.mesh.world]
        roles = {rank: self._plan.role_of(rank) for rank in ranks}
        works = {
            role.role: [self._model.work(role, instr) for instr in role.program]
            for role in roles.values()
        }
        return {rank: works[role.role] for rank, role in roles.items()}

    def _by_instruction(self, matched: Matched) -> tuple[list[Table], dict[str, Any]]:
        seconds = instruction_seconds(self._plan, matched, self._predicted)
        facts = {
            "step_s": {"measured": matched.step_s, "predicted": self._predicted.step_s},
            "instructions": {
                kind: {"count": n, "measured_s": measured, "predicted_s": predicted}
                for kind, (n, measured, predicted) in seconds.items()
            },
            "missing": list(matched.missing),
        }
        return [instruction_table(self._plan, matched, self._predicted)], facts

    def _write(self, matched: Matched) -> None:
        a = self._asked
        if a.calibrate is not None:
            others = {r.program for r in self._ranks} - {"", self._plan.program_key}
            found = ["its model or loss is another one"] * bool(others) + differences(matched)
            if found:
                raise FormatError(
                    f"--calibrate: the trace is of another job or strategy: {'; '.join(found)}; give the file and "
                    f"parameters that ran"
                )
            self._tell_untraced()
            costs = measured_costs(self._plan, matched, self._model, self._cluster, self._origin())
            with writing(a.calibrate, "--calibrate"):
                write_whole(a.calibrate, dumps(costs))
        if a.out is not None:
            self._save(made_folder(a.out), matched)

    def _tell_untraced(self) -> None:
        traced = {rank.rank for rank in self._ranks}
        untraced = [r for r in self._plan.roles if not traced.intersection(r.ranks)]
        if untraced:
            ranks = ", ".join(f"{role.ranks[0]} ({role.role})" for role in untraced)
            warnings.warn(
                f"--calibrate: no trace is of {'rank' if len(untraced) == 1 else 'ranks'} {ranks}, or of one that runs "
                f"the same: durations of what is only there stay formulas; give a trace of each",
                PiperWarning,
                stacklevel=2,
            )

    def _save(self, folder: Path, matched: Matched) -> None:
        """Write plan, prediction and the measured spans as `piper run` does."""
        save_plan(folder, self._plan, self._strategy)
        save_prediction(folder, self._predicted, self._plan)
        with writing(folder):
            write_whole(folder / "spans-measured.json", dumps(matched.trace))
            write_chrome(matched.trace, folder / "trace-measured.json", self._plan)

    def _origin(self) -> Origin:
        first = self._ranks[0]
        here = machine_name() if first.host == platform.node() else first.host or "unknown"
        return Origin(
            device=first.device or here,
            cluster=self._cluster.name,
            backend="trace",
            launcher="trace",
            ranks=self._plan.mesh.world,
            threads=1,
            python=platform.python_version(),
            torch=version("torch"),
            program=self._plan.program_key,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            repeats=1,
        )


def _message_facts(found: MatchedMessages) -> dict[str, Any]:
    return {
        "rows": [asdict(row) for row in found.rows],
        "windows": [asdict(row) for row in found.windows],
        "unplanned": [
            {"op": op, "nbytes": nbytes, "size": size, "count": n}
            for (op, nbytes, size), n in found.unplanned.items()
        ],
        "matched": found.matched,
    }
