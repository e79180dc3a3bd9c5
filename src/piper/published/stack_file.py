"""Write stacks with fitted constants as TOML files; the facts of an existing file stay as they are."""

from __future__ import annotations

from pathlib import Path

from piper_ir.tools import write_whole
from piper_simulator import Stack, StackConstant

_TABLES = "\n[constants."


def write_stack(path: Path, stack: Stack, base: str) -> None:
    """Write a stack's constants into its file.

    A file that is not there yet takes all facts from `base`, the name of a stack or a stack's file, as `--stack` names
    it. A file cannot name another one as its base, so it has a copy of these facts.
    """
    file = path if path.exists() else Path(base)
    if file.suffix == ".toml":
        facts = file.read_text(encoding="utf-8").partition(_TABLES)[0].rstrip()
    else:
        devices = ", ".join(f'"{d}"' for d in stack.devices)
        facts = f'base = "{base}"\ndevices = [{devices}]\nsource = "as {base}; constants: piper accuracy --fit"'
    tables = (_table(name, one) for name, one in stack.constants.items())
    write_whole(path, facts + "\n" + "".join(tables))


def _table(name: str, one: StackConstant) -> str:
    fitted = "fitted = true\n" if one.fitted else ""
    return (
        f"{_TABLES}{name}]\nvalue = {one.value:.4g}\nlow = {one.low:g}\nhigh = {one.high:g}\nprior = {one.prior:g}\n"
        f'{fitted}source = "{one.source}"\n'
    )
