"""Print what a layer saves for its backward where devices share it, beside the published formula.

python -m benchmarks.shard_sizes [PRESET ...]      (default: gpt3-175b, llama3-8b, llama3-70b and llama3-405b)

Bytes are those of values that live from forward to backward in captured and shared chunks, of one row in bfloat16: what
a layer saves, and its own input where its backward reads that. Korthikanti et al. (arXiv
2205.05198, table 2) count s b h (8 + 24 / t) bytes for a layer of a GPT that t devices share, without its masks of
dropout, and 32 s b h / t with sequence parallelism. They do not count statistics.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from piper import models
from piper_capture import Captured, capture, with_shardings
from piper_ir.program.layout import Sharding
from piper_ir.program.program import Chunk

DEGREE = 8
NAMES = ("gpt3-175b", "llama3-8b", "llama3-70b", "llama3-405b")
ROWS = 1
LAYER = "layer0"


@dataclass(frozen=True)
class LayerShare:
    """Hold what one device has of a layer.

    Attributes:
        saved: bytes that live from F to the backward.
        statistics: bytes among them of numbers in float32 that a norm or an attention keeps of each token.
        flops: of all steps.
    """

    saved: int
    statistics: int
    flops: int

    @property
    def values(self) -> int:
        return self.saved - self.statistics


@cache
def captured(name: str) -> Captured:
    """Return the capture of a preset with one layer, which is what it is in the whole model."""
    sizes: Any = replace(models.preset(name), layers=1)
    job = models.job(sizes, global_batch=2)
    return capture(job.model, partial(job.batch, 0), job.loss, dtype=job.precision.compute_dtype)


def shared(name: str, degree: int, stream: str = "", *, keep: bool = False) -> LayerShare:
    """Return what each of `degree` devices has of a layer of a preset."""
    asked = [Sharding("tp", degree, (), stream, keep)] if degree > 1 else []
    program = with_shardings(captured(name), asked).bind(ROWS)
    return of_layer(next(c for c in program.chunks if c.id == LAYER))


def of_layer(layer: Chunk) -> LayerShare:
    """Return what a device has of a layer whose sizes are integers."""
    ports = [layer.ports[name] for name in _kept(layer)]
    small = [spec for spec in ports if spec.dtype == "float32"]
    flops = sum(signature.cost.flops for signature in layer.steps.values())
    return LayerShare(sum(int(s.nbytes) for s in ports), sum(int(s.nbytes) for s in small), flops)


def _kept(layer: Chunk) -> Iterator[str]:
    """Yield the ports whose values live from F to the backward: what F saves, and the inputs that I and W read."""
    values = {f"in{k}" for k, given in enumerate(layer.inputs) if given.kind == "value"}
    read = {port for step in ("I", "W") for port in layer.steps[step].reads}
    yield from (name for name in layer.ports if name.startswith("saved") or name in values & read)


def published(name: str, degree: int, stream: str = "") -> float | None:
    """Return the bytes by the formula, which is that of a GPT."""
    sizes = models.preset(name)
    if not isinstance(sizes, models.GPTConfig):
        return None
    factor = 32 / degree if stream else 8 + 24 / degree
    return factor * sizes.length * ROWS * sizes.width


def line(name: str) -> str:
    """Return a row of the table."""
    whole, plain, tokens = shared(name, 1), shared(name, DEGREE), shared(name, DEGREE, "tokens")
    kept = shared(name, DEGREE, "tokens", keep=True)
    cells = [
        name,
        *(f"{found.saved / 1e6:,.1f}" for found in (whole, plain)),
        _megabytes(published(name, DEGREE)),
        f"{tokens.saved / 1e6:,.1f}",
        _megabytes(published(name, DEGREE, "tokens")),
        f"{kept.saved / 1e6:,.1f}",
        *(
            f"{part:.6f}"
            for part in (DEGREE * tokens.saved / whole.saved, DEGREE * tokens.values / whole.values)
        ),
        *(f"{DEGREE * found.flops / whole.flops - 1:.4%}" for found in (plain, tokens)),
    ]
    return "  ".join(f"{cell:>12}" for cell in cells)


def _megabytes(count: float | None) -> str:
    return "" if count is None else f"{count / 1e6:,.1f}"


def main(names: Sequence[str]) -> None:
    """Print the table."""
    t = f"tp={DEGREE}"
    heads = [
        "MB saved",
        "tp=1",
        t,
        "formula",
        f"{t} tokens",
        "formula",
        "keep",
        "tp x / whole",
        "no statist.",
        "FLOPs more",
        "tokens",
    ]
    print("  ".join(f"{head:>12}" for head in heads))
    for name in names or NAMES:
        print(line(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
