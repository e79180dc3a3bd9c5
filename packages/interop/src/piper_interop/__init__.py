"""Read jobs of other systems as a job and a strategy here, and write strategies as those systems' own files.

No system needs to be installed, but for torchtitan's recipes, which are code. Nothing of another system is imported.
"""

from __future__ import annotations

from importlib import import_module

from piper_interop.neutral.described import (
    DeviceLayout,
    Float8Layers,
    JobDescription,
    ModelSizes,
    OffloadedTensors,
    Recomputation,
    loss_scale,
)
from piper_interop.neutral.options import Judgement
from piper_interop.neutral.system import Asked, Exported, Imported, System
from piper_interop.neutral.writer import job_lines, python
from piper_ir.ground.errors import JobError

SYSTEMS = ("torchtitan", "megatron", "deepspeed", "accelerate")
"""The systems whose files are read and written."""


def system(name: str) -> System:
    """Return a system by its name; raise JobError, with all names, for an unknown one."""
    if name not in SYSTEMS:
        raise JobError(f"unknown system {name!r}; known are {', '.join(SYSTEMS)}")
    found: System = import_module(f"piper_interop.{name}.system").SYSTEM
    return found


def import_job(name: str, source: str, asked: Asked) -> Imported:
    """Read a job of another system.

    Args:
        name: of the system.
        source: a file of it, a text of its options, or the name of one of its configurations.
        asked: the answers that the file does not have.

    Raises JobError for a source that cannot be read, and, all at once, for options that are unknown or that cannot be
    said here.
    """
    of = system(name)
    if unknown := sorted(asked.stand_ins - of.stand_ins.keys()):
        raise JobError(
            f"--as {unknown[0]}: {name} has no such stand-in; "
            + (f"accepted are {', '.join(of.stand_ins)}" if of.stand_ins else "it has none")
        )
    of.check_asked(asked)
    foreign = of.read(source, asked)
    found = Imported(foreign, *of.described(foreign, asked))
    tp, heads = found.described.layout.tp, found.described.sizes.fields.get("heads", 0)
    if heads % tp:
        raise JobError(
            f"{source}: {tp} tensor-parallel devices do not divide {heads} attention heads; give a degree that does"
        )
    return found


def export_job(name: str, described: JobDescription) -> Exported:
    """Return the files of another system for a job; raise JobError that names all that the system cannot do."""
    export = system(name).export
    if export is None:
        raise JobError(f"files of {name} are not written yet")
    return export(described)


__all__ = [
    "SYSTEMS",
    "Asked",
    "JobDescription",
    "Exported",
    "Float8Layers",
    "Imported",
    "Judgement",
    "DeviceLayout",
    "OffloadedTensors",
    "Recomputation",
    "ModelSizes",
    "export_job",
    "import_job",
    "job_lines",
    "loss_scale",
    "python",
    "system",
]
