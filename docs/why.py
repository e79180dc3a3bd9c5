"""Write docs/why.md: the examples of the page, computed. `make gallery` runs it."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from piper.views.why_tables import comparison_tables, why_tables
from piper_compiler import Strategy, compile_program, recipes, synthetic
from piper_ir.ground.mesh import Mesh
from piper_report import Table
from piper_simulator import Why, compare, why

HERE = Path(__file__).resolve().parent
GPT = "simulate examples/gpt_text.py --cluster h100x8 --why"
SHOWN = ("what if",)
"""Tables of GPT that the page shows."""
PAGE = """\
# Why a step takes as long as it does

    piper simulate FILE.py --cluster h100x8 --why

prints the critical path of one step, where ranks stand still and for what, what would change the step, and what
the prediction rests on (`--json`; in Python `piper.why(plan, cluster, costs=costs)`).

    piper simulate A.py B.py
    piper simulate A.py best.json
    piper simulate A.py -p schedule=gpipe --versus schedule=1f1b

compare two strategies: of two files, of a file and a saved strategy, or of one file with another value of a
parameter (`piper.compare(piper.why(a, cluster), piper.why(b, cluster))`). With `--out DIR` the page of the results has
all of it, and why.json the same for programs. `piper report A B` puts two such folders, or two runs, on one page.

`make gallery` (docs/why.py) writes this page.

## The critical path

Every instruction waits for its predecessor on its stream, the instructions that it names, the other ends of its
message, and its host. Going back from the last instruction, from cause to cause, gives a chain of pieces from 0 to
the makespan: the critical path. A second saved elsewhere saves nothing. Each piece has an owner: compute by phase and
stage, a channel (also the latency of its messages), or the host of a role.

The example has two stages of F = I = W = 1 s, four microbatches, a hop of 0.5 s, and 1F1B ({one_f_one_b}):

{path}

## Idle gaps

A gap of a rank is followed back in the same way, from the instruction behind it to the gap's start, so every idle
moment has an owner. *Waits for compute* is the pipeline's bubble: another rank has to compute first. What a rank
does, and what it waits for, adds up to the step.

{ranks}

## What if, and how sensitive

`piper {gpt}`, {date}:

{real}

Each row of *what if* is a simulation of its own.

- *No interference*: messages and what runs beside them do not slow each other down.
- *Perfect overlap*: no computation waits for a message or is slowed by one. The step is still never shorter than the
  messages of the busiest stream.
- *partition(at="cost")*, *replicate(zero=1)*: the same strategy with this argument, where it has even stages, or
  replicas that share nothing.
- *One microbatch more* has as many rows as the others, so that the global batch grows. It needs a strategy that is a
  function of a trial, with the number of microbatches among its parameters.

A *sensitivity* is by how many percent the step changes when one constant of the cluster grows by 1 %. Measured
durations change by the factor by which their formula does.

## What it rests on

*Costs from formulas* lists what nobody has measured, each with the time that it takes alone and its part of the
critical path.

Measured costs have a spread (the median absolute deviation of the repeats), and the prediction has an interval from
it: 100 seeded draws, each instruction normally distributed with 1.4826 times its spread as standard deviation. A
second pair of numbers is for a machine that is slower or faster as a whole: all durations one spread longer, or
shorter, at once. What has no spread (formulas, tables) is held fixed.

## Two strategies

The same pipeline under GPipe and 1F1B:

{comparison}
"""


def example(recipe: str) -> Why:
    """Explain a synthetic pipeline, whose durations are given: no machine matters."""
    program = synthetic(stages=2, F=1.0, I=1.0, W=1.0, hop=0.5)
    made = getattr(recipes, recipe)(pp=2, microbatches=4)
    return why(compile_program(program, Strategy(Mesh(pp=2), made)).plan)


def parts() -> dict[str, str]:
    """Return the examples on the synthetic pipeline, by their name in PAGE."""
    found = example("one_f_one_b")
    path, _, ranks, *_ = why_tables(found)
    tables = {"path": path, "ranks": ranks}
    out = {name: _block(table) for name, table in tables.items()}
    result = compare(example("gpipe"), found)
    compared, by_path, *_ = comparison_tables(result, ("gpipe", "one_f_one_b"), "given durations")
    out["comparison"] = f"{_block(compared)}\n\n{_block(by_path)}"
    return out | {"one_f_one_b": f"a step of {found.step_s:g} s"}


def _block(table: Table) -> str:
    return f"```\n{table.plain()}\n```"


def main() -> None:
    """Write the page."""
    printed = subprocess.run(
        [sys.executable, "-m", "piper", *GPT.split()],
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    real = [
        f"```\n{t.strip()}\n```"
        for t in printed.stdout.split("\n\n")
        if t.strip().startswith(SHOWN)
    ]
    date = datetime.now(UTC).date().isoformat()
    (HERE / "why.md").write_text(PAGE.format(gpt=GPT, date=date, real="\n\n".join(real), **parts()))
    print("docs/why.md")


if __name__ == "__main__":
    main()
