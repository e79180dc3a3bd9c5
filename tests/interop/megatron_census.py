"""Count which training jobs of Megatron-LM's functional tests can be imported, and why the others cannot.

python -m tests.interop.megatron_census CHECKOUT [STAND-IN ...]
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from piper_interop import Asked, Imported, import_job
from piper_ir.ground.errors import JobError

CASES = Path("tests") / "functional_tests" / "test_cases"


def cases(checkout: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the files of training jobs with options of Megatron's own parser, each with these options."""
    for path in sorted((checkout / CASES).rglob("model_config.yaml")):
        arguments = yaml.safe_load(path.read_text()).get("MODEL_ARGS")
        if (
            isinstance(arguments, dict)
            and "--hidden-size" in arguments
            and "inference" not in str(path)
        ):
            yield path, arguments


def devices(arguments: dict[str, Any]) -> int:
    """Return devices on which a job can run: eight, as many as one replica or its experts need, or as its rows feed.

    The files do not say their number, which stands in the recipes beside them. Experts share the devices of a stage with
    the replicas of all other layers.
    """

    def degree(name: str, default: int = 1) -> int:
        return int(arguments.get(f"--{name}-parallel-size", default))

    stages, cut = degree("pipeline-model"), degree("tensor-model")
    model = stages * cut * degree("context")
    experts = stages * degree("expert-model") * degree("expert-tensor", cut)
    rows = int(arguments.get("--micro-batch-size", 1))
    replicas = int(arguments.get("--global-batch-size", 8 * rows)) // rows
    return min(max(8, model, experts), model * replicas)


def _reason(line: str) -> str:
    """Return the missing thing that a line of a refusal names; "" for another line."""
    if ": no such option of megatron" in line:
        return "options of another program"
    before, said, _ = line.partition(" cannot be said here")
    return before.rpartition("): ")[2].rpartition(": ")[2] if said else ""


def attempt(path: Path, number: int, stand_ins: Sequence[str]) -> Imported | tuple[str, ...]:
    """Return the import of a job, or the reasons of its refusal."""
    asked = Asked(devices=number, stand_ins=frozenset(stand_ins))
    try:
        return import_job("megatron", str(path), asked)
    except JobError as error:
        text = str(error).replace(str(path), "FILE")
        reasons = [reason for line in text.splitlines() if (reason := _reason(line))]
        return tuple(dict.fromkeys(reasons)) or (text,)


def main(checkout: Path, stand_ins: Sequence[str]) -> None:
    """Print a table of the reasons: how many jobs have one, and how many have it alone."""
    with_it, alone, number, imported = Counter[str](), Counter[str](), 0, 0
    for path, arguments in cases(checkout):
        result = attempt(path, devices(arguments), stand_ins)
        number += 1
        if isinstance(result, Imported):
            imported += 1
            continue
        with_it.update(result)
        alone.update(result if len(result) == 1 else ())
    print(
        f"{imported} of {number} jobs are imported"
        + (f" --as {', '.join(stand_ins)}" if stand_ins else "")
    )
    for reason, count in with_it.most_common():
        print(f"| {reason} | {count} | {alone[reason]} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
