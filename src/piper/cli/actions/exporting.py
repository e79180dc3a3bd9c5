"""Run `piper export`: a job's strategy as the files of another system."""

from __future__ import annotations

import sys
from dataclasses import replace

from piper.api.ground.results import made_folder, writing
from piper.cli.arguments import ExportArguments
from piper.cli.given import pairs
from piper.cli.loading import load_file
from piper.cli.pipes import show_json
from piper.planning.description import description, left_out, optimizer_note
from piper_interop import export_job
from piper_ir.ground.errors import JobError
from piper_ir.tools import write_whole

COMPILING = ("torchtitan", "deepspeed", "accelerate")
"""The systems with an option that compiles kernels."""


def exported(arguments: ExportArguments) -> None:
    """Print or write the files; raise JobError for a strategy that the system cannot run."""
    a = arguments
    file = load_file(a.file, pairs(a.params), a.strategy)
    described = description(file.job, file.strategy, a.file.stem)
    if file.options.kernels == "inductor":
        described = replace(described, stack="inductor")
    written = export_job(a.to, described)
    if a.out is not None:
        taken = [name for name in written.files if (a.out / name).exists()]
        if taken:
            raise JobError(f"--out {a.out}: there is a {taken[0]} already; give another folder")
        with writing(made_folder(a.out)):
            for name, text in written.files.items():
                write_whole(a.out / name, text)
    notes = [*left_out(file.strategy), optimizer_note(file.job), *written.notes]
    if a.to in COMPILING and described.stack != "inductor":
        notes.append(
            f"kernels are not compiled there; options = piper.Options(kernels='inductor') in {a.file} says it"
        )
    if a.as_json:
        show_json({"files": written.files, "notes": notes})
        return
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    for name, text in written.files.items():
        print(text.rstrip("\n") if a.out is None else f"written: {a.out / name}")
