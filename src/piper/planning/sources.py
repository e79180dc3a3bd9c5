"""Understand the source of a plan as a job: a preset, a config.json, a FILE.py with a job, or another system's job."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from os.path import exists
from pathlib import Path
from typing import TYPE_CHECKING

from piper import models
from piper.models.from_config import CONFIG, Described, describe
from piper.models.library import has_library, library_job, library_length
from piper.models.presets import PRESETS
from piper.planning.foreign import foreign_job
from piper_compiler import Options
from piper_interop import SYSTEMS, Asked, job_lines
from piper_ir.ground.errors import JobError
from piper_ir.tools import count_text

if TYPE_CHECKING:
    from piper_compiler import Strategy
    from piper_runtime import Job

_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:[eE]\d\d?)?)\s*([kmbgt]?)", re.ASCII | re.IGNORECASE)
FILES = (".json", ".sh", ".toml", ".yaml", ".yml")
"""The ends of files of other systems; a name of a recipe or a text of options has none."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


OPTIMIZER_NAMES = {"adamw": "AdamW", "muon": "Muon"}
"""The optimizers of `piper.models.job` as people write them."""


@dataclass(frozen=True)
class StepSize:
    """Say how large a step is, for a source that does not say it itself.

    Attributes:
        length: tokens of a row; None for the model's own.
        tokens_per_step: tokens of a step; None if `rows` says it.
        rows: rows of a step; None if `tokens_per_step` says it.
    """

    length: int | None = None
    tokens_per_step: int | None = None
    rows: int | None = None

    def global_batch(self, length: int) -> int:
        """Return the rows of a step; raise JobError unless one of the two numbers gives them."""
        if (self.rows is None) == (self.tokens_per_step is None):
            raise JobError(
                "say how large a step is: --tokens-per-step, such as 4M, or --global-batch, in rows; one of them"
            )
        if self.rows is not None:
            return self.rows
        assert self.tokens_per_step is not None
        if 2 * self.tokens_per_step < length:
            raise JobError(
                f"--tokens-per-step {self.tokens_per_step:,}: a row has {length:,} tokens, and one row is the least of a "
                f"step; give a smaller --length, or more tokens"
            )
        near = max(1, round(self.tokens_per_step / length))
        power = 2 ** round(math.log2(near))  # which more layouts divide
        return power if abs(power / near - 1) <= 0.05 else near

    def warnings(self, length: int) -> tuple[str, ...]:
        """Return a sentence if a step has not the tokens that are asked for, nearly: 4M may be 2**22."""
        asked, rows = self.tokens_per_step, self.global_batch(length)
        if asked is None or abs(rows * length / asked - 1) <= 0.05:
            return ()
        least = "; one row is the least" if rows == 1 else ""
        step = f"{count_text(rows, 'row')} of {length:,} tokens, {rows * length:,}"
        return (f"--tokens-per-step {asked:,}: a step is {step}{least}",)


@dataclass(frozen=True)
class PlanSource:
    """Hold a source that is understood.

    Attributes:
        name: of the model, for titles and files.
        job: the job.
        facts: the job in words.
        notes: the fields that are taken in the nearest form.
        lines: Python that makes `job` in a file for people.
        strategy: the file's own strategy, if it has one.
        config: the sizes of the model; None for one of a FILE.py.
        options: how the file's own strategy is compiled.
        warnings: where the step or the rows are not as asked for, or not as the model's own.
    """

    name: str
    job: Job
    facts: str
    lines: tuple[str, ...]
    notes: tuple[str, ...] = ()
    strategy: Strategy | None = None
    config: models.DecoderConfig | None = None
    options: Options = field(default_factory=Options)
    warnings: tuple[str, ...] = ()


def count(text: str, flag: str) -> int:
    """Return a number of tokens such as "4M" or "15T"; raise JobError, with the option's name, for anything else."""
    match = _COUNT.fullmatch(re.sub(r"(?<=\d)[,_](?=\d{3}(?!\d))", "", text.strip()))
    number = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if not 1 <= number < 2**60:
        raise JobError(
            f"{flag} {text or repr(text)}: a number such as 8192, 4M or 15T is needed (K, M, B or G, T)"
        )
    return number


def is_foreign(text: str) -> bool:
    """Return whether a source is a job of another system, such as "torchtitan:llama3_70b"."""
    system, colon, _ = text.partition(":")
    return bool(colon) and system in SYSTEMS


def understand(text: str, wanted: StepSize) -> PlanSource:
    """Return the job of a preset or a config.json; raise JobError if there is none, or a step has no size."""
    if text in PRESETS:
        return _preset(text, wanted)
    check_there(text)
    return _config(Path(text), wanted)


def check_there(text: str) -> None:
    """Raise JobError for a source that is neither a preset nor a file; another system's may be no file."""
    foreign = is_foreign(text)
    path = Path(text.partition(":")[2] if foreign else text)
    if foreign and not path.name:
        raise JobError(f"{text} names no job: a file or name stands behind the colon")
    if text in PRESETS or (text.strip() and exists(path)):
        return
    if path.suffix == ".py" or (foreign and path.suffix in FILES):
        raise JobError(f"cannot read the file {path}: there is no such file")
    if not foreign:
        shown = text if text.strip() else "an empty text"
        raise JobError(
            f"{shown}: there is no such preset or file; accepted are {', '.join(PRESETS)}, a {CONFIG} of Hugging Face "
            f"or its folder, and a FILE.py that defines `job`"
        )


def _preset(name: str, wanted: StepSize) -> PlanSource:
    config = models.preset(name)
    length = _length(config, wanted)
    rows = wanted.global_batch(length)
    job = models.job(name, global_batch=rows, length=length)
    line = f"job = piper.models.job({name!r}, global_batch={rows}, length={length})"
    return PlanSource(
        name,
        job,
        _facts(config, job),
        (line,),
        config=config,
        warnings=_warnings(config, wanted, length),
    )


def _config(path: Path, wanted: StepSize) -> PlanSource:
    described = describe(path)
    folder = path if path.is_dir() else path.parent
    name = folder.resolve().name if path.name in (CONFIG, folder.name) else path.stem
    name = re.sub(r"[^\w.+-]+", "_", name)
    if described.config is None:
        if has_library() and described.fields.get("quantization_config") is None:
            return _library(path / CONFIG if path.is_dir() else path, name, described, wanted)
        raise _unsaid(path, described)
    config = described.config
    length = _length(config, wanted)
    rows = wanted.global_batch(length)
    job = models.job(config, global_batch=rows, length=length)
    lines = (
        f"sizes = {config.source()}",
        f"job = piper.models.job(sizes, global_batch={rows}, length={length})",
    )
    return PlanSource(
        name,
        job,
        _facts(config, job),
        lines,
        described.notes,
        config=config,
        warnings=_warnings(config, wanted, length),
    )


def _library(file: Path, name: str, described: Described, wanted: StepSize) -> PlanSource:
    """Return the job of a type that no description says, by its class of transformers."""
    length = wanted.length or library_length(file)
    rows = wanted.global_batch(length)
    job = library_job(file, global_batch=rows, length=length)
    line = f"job = library_job({str(file.resolve())!r}, global_batch={rows}, length={length})"
    facts = (
        f"a {described.type} of transformers; {count_text(rows, 'row')} of {length:,} tokens per step ({rows * length:,}); "
        f"bfloat16 over float32, AdamW"
    )
    note = f"no description says a {described.type} ({described.missing}): its class of transformers is captured"
    lines = ("from piper.models.library import library_job", "", line)
    return PlanSource(name, job, facts, lines, (note,), warnings=wanted.warnings(length))


def _warnings(config: models.DecoderConfig, wanted: StepSize, length: int) -> tuple[str, ...]:
    """Return the sentences about a step of another size than asked for, and of rows beyond the positions."""
    said = list(wanted.warnings(length))
    if config.positions == "rotary" and length > config.length:
        said.append(
            f"--length {length:,}: the model has rotary positions for {config.length:,} tokens; time and memory are those "
            f"of longer rows, whose positions are not scaled"
        )
    return tuple(said)


def _length(config: models.DecoderConfig, wanted: StepSize) -> int:
    """Return the tokens of a row; raise JobError if the model has fewer learned positions."""
    length = wanted.length or config.length
    if config.positions == "learned" and length > config.length:
        raise JobError(
            f"--length {length}: the model has learned positions for {config.length} tokens; give at most these"
        )
    return length


def _unsaid(path: Path, described: Described) -> JobError:
    library = "" if has_library() else " (it is not here)"
    return JobError(
        f"{path}: no description says a {described.type} ({described.missing}); where transformers is installed{library} "
        f"its class is taken instead, unless weights are quantised, or write a FILE.py whose `job` is yours (docs/models.md)"
    )


def of_system(text: str, asked: Asked) -> PlanSource:
    """Return the source of a job of another system, such as "megatron:pretrain.sh".

    Raises JobError for a job that cannot be said here, with all that stops it.
    """
    system, _, source = text.partition(":")
    foreign = foreign_job(system, source, asked)
    described = foreign.imported.described
    name = re.sub(r"[^\w.+-]+", "_", described.name)
    lines = tuple(job_lines(described))
    facts = _facts(foreign.sizes, foreign.job, OPTIMIZER_NAMES[described.optimizer])
    notes, strategy = described.notes, foreign.strategy
    return PlanSource(name, foreign.job, facts, lines, notes, strategy, foreign.sizes)


def job_facts(job: Job) -> str:
    """Return the rows, tokens and precision of a job in words."""
    tokens = "" if job.tokens_per_row is None else f" of {job.tokens_per_row:,} tokens"
    return f"{count_text(job.global_batch, 'row')}{tokens} per step, {_precision(job)}"


def of_file(path: Path, job: Job, strategy: Strategy | None, wanted: StepSize) -> PlanSource:
    """Return the source of a FILE.py's job; raise JobError for numbers that the file says itself."""
    if wanted != StepSize():
        raise JobError(
            f"{path} defines the job, with its rows and tokens; leave --length, --tokens-per-step and --global-batch "
            f"out"
        )
    # As a command runs it: a capture imports the module of a model's functions by its name.
    lines = (
        "from piper.cli.loading import load_job",
        "",
        f"job = load_job({str(path.resolve())!r})[0]",
    )
    return PlanSource(path.stem, job, job_facts(job), lines, strategy=strategy)


def _facts(config: models.DecoderConfig, job: Job, optimizer: str = "AdamW") -> str:
    """Return a model of `piper.models` and its job in words."""
    parameters = models.parameter_count(config)
    size = f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"
    mixture = f", {config.experts.number} experts" if config.experts is not None else ""
    rows, length = job.global_batch, job.tokens_per_row or 0
    return (
        f"a decoder of {size} parameters, {count_text(config.layers, 'layer')}{mixture}; "
        f"{count_text(rows, 'row')} of {length:,} tokens per step ({rows * length:,}); {_precision(job)}, {optimizer}"
    )


def _precision(job: Job) -> str:
    precision = job.precision
    narrow = f", {precision.quantised.recipe} float8" if precision.quantised else ""
    return f"{precision.compute or precision.params} over {precision.params}{narrow}"
