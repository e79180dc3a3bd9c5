"""Print the command lines that start a file's ranks, with the given options: `piper launch`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from piper_ir.errors import JobError
from piper_runtime.launch import launch_sections, launch_text


def print_launch(
    file: Path,
    world: int,
    *,
    nodes: int | None,
    params: Sequence[str],
    options: Mapping[str, object],
    refused: Mapping[str, bool],
    as_json: bool,
) -> None:
    """Print the command lines that start the ranks of a file.

    Args:
        file: The user's FILE.py.
        world: Number of ranks.
        nodes: Machines; None for a default.
        params: Parameters as `-p` gives them.
        options: Options that stand in the lines, by flag. None or False for one that was not given.
        refused: Options that no line can have, and whether they were given. JobError if any was.
        as_json: Print JSON and nothing else.
    """
    if wrong := [flag for flag, given in refused.items() if given]:
        raise JobError(
            f"--print-launch prints how to start a training with torchrun, with Slurm or in a Ray of its own: leave out "
            f"{' and '.join(wrong)}"
        )
    given = [a for p in params for a in ("-p", p)]
    for flag, value in options.items():
        if value is not None and value is not False:
            given += [flag] if value is True else [flag, str(value)]
    sections = launch_sections(file, world, nodes=nodes, arguments=given)
    print(json.dumps({name: s.lines for name, s in sections.items()}) if as_json else launch_text(sections), end="\n" * as_json)
