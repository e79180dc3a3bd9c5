"""Turn a job of another system into a job and a strategy here, by the FILE.py that says it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piper import models
from piper.models.from_config import describe
from piper.models.presets import PRESETS
from piper_interop import Asked, Imported, ModelSizes, import_job, python
from piper_ir.ground.errors import JobError, PiperWarning
from piper_ir.tools import count_text

if TYPE_CHECKING:
    from piper_compiler import Strategy
    from piper_runtime import Job


@dataclass(frozen=True)
class ForeignJob:
    """Hold an imported job, with the FILE.py that says it.

    Attributes:
        imported: the job as its system says it, and the verdicts on its options.
        text: the FILE.py.
    """

    imported: Imported
    text: str

    @cached_property
    def _names(self) -> dict[str, Any]:
        names: dict[str, Any] = {}
        with warnings.catch_warnings():
            # The notes that the file repeats are told by whoever imports.
            warnings.simplefilter("ignore", PiperWarning)
            exec(compile(self.text, f"<{self.imported.foreign.source}>", "exec"), names)
        return names

    @property
    def job(self) -> Job:
        """Return the job; raise JobError for sizes that do not go together."""
        job: Job = self._names["job"]
        self._check(self.sizes)
        return job

    @property
    def sizes(self) -> models.DecoderConfig:
        """Return the sizes of the model."""
        sizes: models.DecoderConfig = self._names["sizes"]
        return sizes

    @property
    def strategy(self) -> Strategy:
        """Return the strategy; raise DirectiveError for directives that do not go together."""
        strategy: Strategy = self._names["strategy"]
        return strategy

    def _check(self, sizes: models.DecoderConfig) -> None:
        """Raise JobError if the model here has another number of parameters than the system says of its own."""
        told = self.imported.described.parameters
        own = models.parameter_count(sizes)
        if told is not None and told != own:
            raise JobError(
                f"{self.imported.foreign.source}: {self.imported.foreign.system} counts {told:,} parameters, and the "
                f"same sizes give {own:,} here; so the model here is another one: write a FILE.py whose job builds the "
                f"system's own module, and plan that"
            )


def foreign_job(system: str, source: str, asked: Asked) -> ForeignJob:
    """Import a job of another system; raise JobError, with all that stops it at once."""
    imported = import_job(system, source, asked)
    foreign = imported.foreign
    version = f" {foreign.version}" if foreign.version else ""
    title = f"{foreign.source} of {foreign.system}{version} on {count_text(imported.described.layout.devices, 'device')}"
    return ForeignJob(imported, python(imported.described, title))


def sizes_of(path: Path) -> ModelSizes:
    """Return the sizes of a preset or a config.json's model for an import.

    Raises JobError if no decoder here is the same.
    """
    if str(path) in PRESETS:
        return model_sizes(PRESETS[str(path)])
    described = describe(path)
    if described.config is None:
        raise JobError(
            f"--model {path}: the models here do not say the same as a {described.type} ({described.missing})"
        )
    # The classes of transformers leave out the blocks that predict further tokens.
    return model_sizes(replace(described.config, mtp=0))


def model_sizes(config: Any) -> ModelSizes:
    """Return the fields of a description that are not at their defaults."""
    values = {
        f.name: getattr(config, f.name)
        for f in fields(config)
        if getattr(config, f.name) != f.default
    }
    nested = {name: model_sizes(value) for name, value in values.items() if is_dataclass(value)}
    return ModelSizes({**values, **nested}, type(config).__name__)
