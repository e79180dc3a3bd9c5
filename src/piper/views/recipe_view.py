"""Show a recipe or a table of torch's, compiled for a synthetic program and simulated; and list all recipes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from piper.api.compiling.compiling import Compiled, compile
from piper_compiler import MOST_SECONDS, Directive, Options, Strategy, read_schedule_csv, synthetic
from piper_compiler.recipes import RECIPES, Recipe, stages_of
from piper_ir.ground.codec import unique_keys
from piper_ir.ground.errors import FormatError, JobError
from piper_ir.ground.mesh import Mesh
from piper_ir.tools import count_text, time_text, user_code
from piper_simulator import Simulation, simulate

OWN = ("pp", "microbatches", "chunks")
"""The arguments of a recipe that have options of their own."""


@dataclass(frozen=True)
class ChunkTimes:
    """Hold the seconds of one chunk.

    Attributes:
        F: Forward.
        I: Gradient of the input.
        W: Gradient of the weights.
        O: An overlapped pair; None for F + I + W.
    """

    F: float = 1.0
    I: float = 1.0  # noqa: E741 - the field's name for the input gradient
    W: float = 1.0
    O: float | None = None  # noqa: E741 - the field's name for an overlapped pair

    @staticmethod
    def parse(text: str | None) -> ChunkTimes:
        """Read `--times 3,4,2` or `1,1,1,2.5`; None stands for a second each. Raises JobError for anything else."""
        if text is None:
            return ChunkTimes()
        try:
            numbers = [float(x) for x in text.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) not in (3, 4) or not all(0 <= x <= MOST_SECONDS for x in numbers):
            expected = (
                f"seconds of F, I, W and perhaps of an overlapped pair, from 0 to {MOST_SECONDS:g}, are expected, "
                f"e.g. 3,4,2 or 1,1,1,2.5"
            )
            raise JobError(f"--times {text}: {expected}")
        return ChunkTimes(*numbers)


@dataclass(frozen=True)
class SimulatedRecipe:
    """Hold a recipe with its plan and its simulation."""

    recipe: Recipe
    compiled: Compiled
    simulation: Simulation

    @property
    def peaks(self) -> list[int]:
        return list(self.simulation.peak_bytes)

    @property
    def idle(self) -> float:
        """Return the global bubble as a part of the makespan."""
        return (
            self.simulation.global_bubble_s / self.simulation.step_s
            if self.simulation.step_s
            else 0.0
        )

    def numbers(self) -> dict[str, Any]:
        """Return the numbers for programs."""
        simulation = self.simulation
        return {
            "recipe": self.recipe.name, "makespan_s": simulation.step_s, "global_bubble_s": simulation.global_bubble_s,
            "span_bubble_s": simulation.span_bubble_s, "bubble_s": list(simulation.bubble_s), "peak_activations": self.peaks,
        }  # fmt: skip

    def text(self) -> str:
        """Return the lines that stand beneath a schedule."""
        simulation = self.simulation
        distinct_peaks = sorted(set(self.peaks))
        peaks = (
            str(distinct_peaks[0]) if len(distinct_peaks) == 1 else ", ".join(map(str, self.peaks))
        )
        within = time_text(simulation.span_bubble_s)
        bubble = f"bubble {time_text(simulation.global_bubble_s)} ({self.idle:.1%}), {within} of it between a device's"
        return (
            f"{self.recipe.name}: makespan {time_text(simulation.step_s)}, {bubble} first and last "
            f"instruction\npeak {peaks} activations of a chunk on "
            f"{'every device' if len(distinct_peaks) == 1 else 'devices 0, 1, ...'}\n{self.recipe.formula}"
            + f"; peak {self.recipe.peak} on device r"
            * bool(self.recipe.peak)
        )


@dataclass(frozen=True)
class Pipeline:
    """Hold the size of a pipeline: devices, microbatches, and chunks per device, None for the recipe's own number."""

    pp: int
    microbatches: int
    chunks: int | None = None


def shown(
    name: str,
    pipeline: Pipeline,
    times: ChunkTimes | None = None,
    more: Mapping[str, object] | None = None,
    activation: int = 1,
) -> SimulatedRecipe:
    """Compile and simulate a recipe; `more` are arguments of its own.

    Raises JobError for an unknown name or argument, and the recipe's own DirectiveError.
    """
    recipe = find(name)
    times = times or ChunkTimes()
    directives = directives_of(recipe, pipeline, times, more or {})
    return _simulated(recipe, Strategy(Mesh(pp=pipeline.pp), directives), times, activation)


def is_table(file: Path | None) -> TypeGuard[Path]:
    """Return whether a file is a table of torch.distributed.pipelining, by its name."""
    return file is not None and file.suffix.lower() == ".csv"


def shown_table(file: Path, times: str | None, *others: object) -> SimulatedRecipe:
    """Compile and simulate a table of torch.distributed.pipelining.

    Raises FormatError for a file that is none, and JobError if one of the `others` is given, which have no use here.
    """
    if any(option is not None for option in others):
        raise JobError(
            f"{file} is drawn with the durations of --times; leave out options of strategies and of recipes"
        )
    table = read_schedule_csv(file)
    counts = {"device": len(table.rows), "stage": table.stages, "microbatch": table.microbatches}
    facts = ", ".join(
        count_text(n, noun, "microbatches" * (noun == "microbatch")) for noun, n in counts.items()
    )
    recipe = Recipe(
        file.name,
        lambda: table.directives(),
        "a table of torch.distributed.pipelining",
        facts,
        "",
        "",
    )
    return _simulated(
        recipe, Strategy(Mesh(pp=len(table.rows)), recipe.make()), ChunkTimes.parse(times), 1
    )


def _simulated(
    recipe: Recipe, strategy: Strategy, times: ChunkTimes, activation: int
) -> SimulatedRecipe:
    stages = stages_of(strategy.directives)
    if stages is None:
        raise FormatError(
            f"recipe {recipe.name} has no partition, so its stages are not known; begin it with "
            f"partition(stages=...)"
        )
    program = synthetic(
        stages=stages, F=times.F, I=times.I, W=times.W, overlap=times.O, activation=activation
    )
    compiled = compile(
        program, strategy, options=Options(fuse=False)
    )  # chunks that follow each other are drawn apart
    return SimulatedRecipe(recipe, compiled, simulate(compiled.plan))


def find(name: str) -> Recipe:
    """Return a recipe by name; raise JobError, which lists all names."""
    if name not in RECIPES:
        raise JobError(
            f"--recipe {name}: no such recipe; there are {', '.join(sorted(RECIPES))}. Yours comes with its FILE.py"
        )
    return RECIPES[name]


def directives_of(
    recipe: Recipe, pipeline: Pipeline, times: ChunkTimes, more: Mapping[str, object]
) -> tuple[Directive, ...]:
    """Call a recipe with the arguments that it takes; one that asks for times, like the search, gets `times`."""
    accepted = inspect.signature(recipe.make).parameters
    keywords: dict[str, Any] = {k: v for k, v in asdict(pipeline).items() if v is not None}
    keywords |= {k: v for k, v in asdict(times).items() if k in ("F", "I", "W") and k in accepted}
    keywords |= dict(more)
    unknown = [k for k in keywords if k not in accepted]
    if unknown:
        raise JobError(
            f"recipe {recipe.name} has no argument {unknown[0]!r}; it has {', '.join(accepted)}"
        )
    missing = [k for k, p in accepted.items() if p.default is p.empty and k not in keywords]
    if missing:
        raise JobError(
            f"recipe {recipe.name} needs {missing[0]!r}; give it as -p {missing[0]}=VALUE"
        )
    with user_code(f"recipe {recipe.name}", JobError):
        directives: tuple[Directive, ...] = recipe.make(**keywords)
    return directives


def arguments_of(params: Mapping[str, str]) -> dict[str, Any]:
    """Return `-p` options of a recipe: JSON as such, else text; raise JobError for arguments with their own option."""
    values: dict[str, Any] = {}
    for name, text in params.items():
        if name in OWN:
            raise JobError(f"-p {name}={text}: give it as --{name} {text}")
        try:
            values[name] = json.loads(text, object_pairs_hook=unique_keys)
        except FormatError as e:
            raise JobError(f"-p {name}={text}: {e}") from None
        except (ValueError, RecursionError):  # no JSON, or a number of thousands of digits
            values[name] = text
    return values


def listing() -> str:
    """Return all recipes, for a person."""
    blocks = []
    for recipe in sorted(RECIPES.values(), key=lambda r: r.name):
        rows = [
            ("formula", recipe.formula),
            ("peak", recipe.peak),
            ("use", recipe.use),
            ("rule", recipe.rule),
            ("source", recipe.source),
        ]
        blocks.append("\n".join([recipe.name, *(f"  {k.ljust(8)} {v}" for k, v in rows if v)]))
    note = (
        "p devices, m microbatches, v chunks per device; F, I, W, B = I + W, O (an overlapped pair): seconds of "
        "one chunk;\npeak: activations of one chunk and microbatch on device r. piper show --recipe NAME draws one."
    )
    return "\n\n".join([*blocks, note])


def rows() -> list[dict[str, Any]]:
    """Return all recipes, for programs."""
    entries = []
    for recipe in sorted(RECIPES.values(), key=lambda r: r.name):
        row = {k: v for k, v in asdict(recipe).items() if k != "make"}
        entries.append(row | {"arguments": list(inspect.signature(recipe.make).parameters)})
    return entries
