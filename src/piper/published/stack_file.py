"""Write stacks with fitted constants as TOML files; the facts and comments of an existing file stay as they are."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path

import tomlkit

from piper_ir.ground.errors import ClusterError, JobError
from piper_ir.tools import write_whole
from piper_simulator import STACKS, Stack, read_software

_OF_FILES = ("name", "constants", "words", "source", "seen")
"""The fields of a stack that may differ between a file and the stack whose constants it takes."""


def check_target(path: Path, start: Stack) -> None:
    """Raise JobError if a file that is there cannot take the constants of a stack: it has other facts, or none."""
    if not path.exists():
        return
    advice = "name a file that is not there yet"
    try:
        own = read_software(path, STACKS)
    except ClusterError as error:
        raise JobError(
            f"--fit {path} is there, and no file of a stack; {advice}: {error}"
        ) from None
    others = [
        f.name
        for f in fields(Stack)
        if f.name not in _OF_FILES and getattr(own, f.name) != getattr(start, f.name)
    ]
    if others:
        some = ", ".join([*others[:3], *(["..."] if len(others) > 3 else [])])
        raise JobError(
            f"--fit {path} is there, with other facts than {start.name} ({some}); {advice}, or fit the file itself by "
            f"--stack {path}"
        )


def write_stack(path: Path, stack: Stack, base: str) -> None:
    """Write a stack's constants into its file.

    A file that is not there yet takes all facts from `base`, the name of a stack or a stack's file, as `--stack` names
    it. A file cannot name another one as its base, so it has a copy of these facts.
    """
    file = path if path.exists() else Path(base)
    if file.suffix == ".toml":
        written = tomlkit.parse(file.read_text(encoding="utf-8"))
    else:
        written = tomlkit.document()
        written["base"] = base
        written["devices"] = list(stack.devices)
        written["source"] = f"as {base}; constants: piper accuracy --fit"
    written["seen"] = stack.seen
    if "constants" not in written:
        written["constants"] = tomlkit.table(is_super_table=True)
    constants = written["constants"]
    for name, one in stack.constants.items():
        value = min(max(float(f"{one.value:.4g}"), one.low), one.high)
        entry = asdict(replace(one, value=value))
        if not one.fitted:
            del entry["fitted"]
        if name in constants:
            constants[name].pop("fitted", None)
            for key, new in entry.items():
                constants[name][key] = new
        else:
            constants[name] = entry
    write_whole(path, tomlkit.dumps(written))
