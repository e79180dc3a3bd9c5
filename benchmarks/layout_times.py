"""Show by formula how long a layer computes and how long its messages take, for devices that share it.

python -m benchmarks.layout_times                            Llama-3 70B on h100x8, tp = 1, 2, 4, 8
python -m benchmarks.layout_times gpt3-175b h100x8           another preset, another cluster

One row per microbatch, bf16, F, I and W of one layer. With the stream the tokens are shared, too. Nothing overlaps. The
graphs are those that devices run. It prints one line per degree, with the date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import piper
from piper import Mesh, Strategy, models, recipes
from piper_ir.plan.plan import COMPUTE, Instr, Part
from piper_ir.program.ops import Compute
from piper_simulator import Cluster, DeviceModel, load_cluster

DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True)
class LayerTimes:
    """Hold the milliseconds of one layer, and how many messages it has in F, I and W."""

    tp: int
    stream: bool
    compute: float
    messages: float
    count: tuple[int, ...]

    def __str__(self) -> str:
        share = self.messages / (self.compute + self.messages)
        stream = "stream" if self.stream else "whole"
        return (
            f"tp={self.tp} {stream:<7}{self.compute:>8.2f} ms of compute{self.messages:>8.2f} ms "
            f"of messages "
            f"({share:.0%})"
            f"   messages in F, I, W: {', '.join(map(str, self.count))}"
        )


def measure(
    name: str, cluster: Cluster, degrees: tuple[int, ...] = DEGREES
) -> Iterator[LayerTimes]:
    """Yield the times of the second layer of a preset at each degree."""
    job = models.job(replace(models.preset(name), layers=2), global_batch=1)
    for tp in degrees:
        for stream in (False, True) if tp > 1 else (False,):
            shared = recipes.tensor_parallel(sequence=stream) if tp > 1 else ()
            plan = piper.compile(job, Strategy(Mesh(tp=tp), shared)).plan
            (role,), model = plan.roles, DeviceModel(plan, cluster, None)
            layer = next(c for c in plan.chunks if c.coords.get("layer") == 1)
            steps = [s for s in ("F", "I", "W") if s in layer.steps]
            done = [
                model.work(role, Instr(COMPUTE, (Part("", Compute(layer.id, s)),))) for s in steps
            ]
            inside = sum(w.inside_s for w in done)
            count = tuple(len(layer.steps[s].collectives) for s in steps)
            yield LayerTimes(
                tp, stream, 1e3 * (sum(w.seconds for w in done) - inside), 1e3 * inside, count
            )


def main(arguments: list[str]) -> int:
    """Print the table; return the exit code."""
    name, cluster = (
        (*arguments, "llama3-70b", "h100x8")[:2] if not arguments else (*arguments, "h100x8")[:2]
    )
    length = models.preset(name).length
    print(f"{name}, one layer, {length} tokens, {cluster}, {datetime.now(UTC):%d %B %Y}")
    for times in measure(name, load_cluster(cluster)):
        print(times, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
