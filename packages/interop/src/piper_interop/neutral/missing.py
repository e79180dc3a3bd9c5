"""Ask for the parts of a job that files of a system never say: the model, tokens of a row, number of devices."""

from __future__ import annotations

from collections.abc import Sequence

from piper_interop.neutral.described import JobDescription, ModelSizes
from piper_interop.neutral.system import Asked
from piper_ir.ground.errors import JobError
from piper_ir.tools import count_text


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
            f"{described.name}: {system} cannot do {count_text(len(impossible), 'part')} of this strategy\n{lines}"
        )


def shared_limits(described: JobDescription, no_pipeline: str, no_sequence: str) -> list[str]:
    """Return the parts of a job that neither Accelerate nor DeepSpeed can do: stages, states along cp, kept tensors.

    Args:
        described: the job.
        no_pipeline: the words for stages, behind "pp=N: ".
        no_sequence: the nearest of sequence parallelism over tp.
    """
    layout = described.layout
    lines = []
    if layout.pp > 1:
        lines.append(f"pp={layout.pp}: {no_pipeline}; nearest: pp=1, zero=3")
    if layout.sequence and layout.tp > 1:
        lines.append(f"sequence parallelism over tp; nearest: {no_sequence}")
    if layout.cp > 1 and layout.zero and not layout.over_cp:
        lines.append("states that are whole along cp; nearest: states sharded over dp and cp")
    if described.offload is not None and described.offload.tensors != "inputs":
        lines.append(f'offload of tensors="{described.offload.tensors}"; nearest: "inputs"')
    lines += [
        f'keep="{part.keep}" of {"all" if part.layers is None else part.layers} layers; nearest: "inputs" of all layers'
        for part in described.recompute
        if part.keep != "inputs"
        or part.layers not in (None, described.sizes.fields.get("layers"))
        or part.group > 1
    ]
    return lines
