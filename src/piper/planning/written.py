"""Write the chosen strategy as a FILE.py for people, with best.json and the plan."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap

from piper.api.ground.results import save_plan, writing
from piper.api.problems.job_space import KnownChoices
from piper.api.problems.spaces import StrategySpace
from piper.api.problems.variants import PlanVariant, precision_text
from piper.planning.answers import Answer
from piper.planning.sources import PlanSource
from piper_compiler import Options, Strategy, save_strategy
from piper_ir.tools import write_whole

PLANNED = "planned.py"
"""The name of the file for people."""
BEST = "best.json"


def write(folder: Path, source: PlanSource, answer: Answer, cluster: str) -> Path:
    """Write the files of an answer into a folder, and return the file for people."""
    assert answer.best is not None and answer.best.strategy is not None
    strategy = answer.best.strategy
    file = folder / PLANNED
    with writing(folder):
        write_whole(file, text(source, strategy, answer.space, cluster))
    save_strategy(strategy, folder / BEST)
    save_plan(folder, answer.best.plan, strategy)
    return file


def text(source: PlanSource, strategy: Strategy, space: StrategySpace, cluster: str) -> str:
    """Return the FILE.py: the job, and the strategy as directives."""
    mesh, calls = space.chosen(KnownChoices(strategy.params))
    variant = PlanVariant.of(strategy.params)
    dtypes = variant.dtypes(source.job.precision)
    changed = dtypes != source.job.precision
    job = [f"job = dataclasses.replace(job, precision={precision_text(dtypes)})"] if changed else []
    words = {n: v for n, v in vars(variant.options).items() if v != getattr(Options(), n)}
    said = ", ".join(f"{name}={value!r}" for name, value in words.items())
    sizes = ", ".join(f"{axis}={mesh.size(axis)}" for axis in reversed(mesh.axes))
    sizes += f", order={mesh.order!r}" if mesh.order else ""
    head = (
        f'"""{source.name} on {cluster}, planned by `piper plan`: {source.facts}'
        f"{variant.text(space.variants)}.",
        "",
        *(
            line
            for note in (*source.notes, *source.warnings)
            for line in wrap(f"As nearest: {note}.", 118)
        ),
        *([""] if source.notes or source.warnings else []),
        f"piper simulate {PLANNED} --cluster '{cluster}'; piper verify, run and explain take it, too.",
        '"""',
        "",
        *(["import dataclasses", ""] if job else []),
        "import piper",
        "from piper import ANY, recipes, where",
        "",
        *source.lines,
        *job,
        *([f"options = piper.Options({said})"] if said else []),
        "strategy = piper.Strategy(",
        f"    piper.Mesh({sizes}),",
        "    (",
        *(f"        {call.text()}," for call in calls),
        "    ),",
        ")",
    )
    return "\n".join(head) + "\n"
