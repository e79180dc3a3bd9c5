"""Define the options of `piper plan` and `tune` for the variants of plans and the values to try."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from piper.cli.completion import one_of, space_parameters
from piper.cli.given import pairs
from piper_ir.ground.errors import JobError

GRAPHS = {"off": (False,), "on": (True,), "both": (False, True)}
"""The values that each word for CUDA graphs stands for."""
TRUTHS = {"true": True, "True": True, "false": False, "False": False}

KernelsTriedOption = Annotated[
    str | None,
    typer.Option(
        "--kernels",
        metavar="eager,inductor",
        autocompletion=one_of("eager", "inductor", "eager,inductor"),
        help="the kernels to choose from, or one; for a FILE.py with a strategy of its own, those of --confirm",
    ),
]
PrecisionTriedOption = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="NAMES",
        help="to choose from: job (its own), float32, bf16, fp16, fp8, fp8:RECIPE; several with commas",
    ),
]
GraphsTriedOption = Annotated[
    str | None,
    typer.Option(
        "--cuda-graph",
        metavar="off|on|both",
        autocompletion=one_of(*GRAPHS),
        help="whether steps are CUDA graphs, or the faster of both",
    ),
]
ParametersTriedOption = Annotated[
    list[str] | None,
    typer.Option(
        "-p",
        metavar="NAME=VALUES",
        autocompletion=space_parameters,
        help="a parameter of the strategies that Piper makes (docs/tuning.md): a value fixes it, several with commas are tried",
    ),
]


def tried_parameters(params: Sequence[str] | None) -> dict[str, Any]:
    """Return the arguments of `piper.space` for `-p` options; raise JobError for an unknown name or value."""
    from piper.api.problems.tried_values import PARAMETERS

    tried: dict[str, Any] = {}
    for name, text in pairs(params, several="tried by `").items():
        if name not in PARAMETERS:
            raise JobError(f"-p {name}={text}: the parameters are {', '.join(PARAMETERS)}")
        tried[name] = []
        for word in text.split(","):
            values = [value for value in _read(word) if PARAMETERS[name].takes(value)]
            if not values:
                raise JobError(f"-p {name}={word}: accepted are {PARAMETERS[name].accepted}")
            tried[name].append(values[0])
    return tried


def _read(word: str) -> list[Any]:
    """Return the values for which a word may stand: numbers, truth values, and itself."""
    values: list[Any] = []
    for kind in (int, float, TRUTHS.__getitem__):
        with suppress(ValueError, KeyError):
            values.append(kind(word))
    return [*values, word]


def tried_variants(
    kernels: str | None, precision: str | None, cuda_graph: str | None
) -> dict[str, Any]:
    """Return the arguments of `piper.space` for the variants that were asked for; none for no options.

    Raises JobError for a list with an empty value, and for a word that is none.
    """
    asked: dict[str, Any] = {}
    for name, text in (("kernels", kernels), ("precision", precision)):
        if text is not None:
            asked[name] = [value.strip() for value in text.split(",")]
            if not all(asked[name]):
                raise JobError(f"--{name} {text!r}: a name is needed before and after each comma")
    if cuda_graph is not None:
        if cuda_graph not in GRAPHS:
            raise JobError(f"--cuda-graph {cuda_graph}: one of {', '.join(GRAPHS)} is accepted")
        asked["cuda_graph"] = GRAPHS[cuda_graph]
    return asked
