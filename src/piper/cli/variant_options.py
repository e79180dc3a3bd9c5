"""Define the options of `piper plan` and `tune` for variants of plans: kernels, precisions and CUDA graphs to try."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from piper.cli.completion import one_of
from piper_ir.ground.errors import JobError

GRAPHS = {"off": (False,), "on": (True,), "both": (False, True)}
"""The values that each word for CUDA graphs stands for."""

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
