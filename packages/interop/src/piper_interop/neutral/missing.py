"""Ask for the parts of a job that files of a system never say: the model, tokens of a row, number of devices."""

from __future__ import annotations

from collections.abc import Sequence

from piper_interop.neutral.described import JobDescription, ModelSizes
from piper_interop.neutral.system import Asked
from piper_ir.ground.errors import JobError


def asked_for(system: str, asked: Asked) -> tuple[ModelSizes, int, int]:
    """Return the sizes of the model, the tokens of a row and the number of devices.

    Raises JobError that names the flags of all that are missing, or that are no positive numbers.
    """
    flags = {
        "--model CONFIG.JSON (the model)": asked.sizes,
        "--length N (tokens of a row)": asked.length,
        "--gpus N (devices)": asked.devices,
    }
    if missing := [flag for flag, value in flags.items() if value is None]:
        raise JobError(f"a file of {system} does not say everything; give {', '.join(missing)}")
    assert asked.sizes is not None and asked.length is not None and asked.devices is not None, (
        "none is missing"
    )
    if asked.length < 1 or asked.devices < 1:
        raise JobError(
            f"--length {asked.length} and --gpus {asked.devices}: numbers from 1 are expected"
        )
    return asked.sizes, asked.length, asked.devices


def lacks(system: str, described: JobDescription, impossible: Sequence[str]) -> None:
    """Raise JobError that names all parts of a job that a system cannot do, if there are any."""
    if impossible:
        lines = "\n".join(f"  {line}" for line in impossible)
        raise JobError(
            f"{described.name}: {system} cannot do {len(impossible)} parts of this strategy\n{lines}"
        )
