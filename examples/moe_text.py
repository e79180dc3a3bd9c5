"""A small byte-level mixture of experts on real text (the Python standard library's source), whose two workers share
experts.

python examples/moe_text.py            the loop: profile, predict, train 60 steps over Ray, report with the load of the experts
python examples/moe_text.py processes  the same without Ray
piper simulate examples/moe_text.py    a prediction alone; --cluster h100x8 for two H100s, --load zipf:0.3 for uneven experts
piper explain examples/moe_text.py     what runs where, and which tokens change devices
piper verify examples/moe_text.py      float64, against plain PyTorch on one device
"""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

import piper
from piper.models import DecoderConfig, MoEConfig

if TYPE_CHECKING:
    from piper.sessions.training import Session, Settings
    from piper_runtime.launch import RunOptions

SIZES = MoEConfig(
    layers=4, width=128, heads=4, kv_heads=2, hidden=128, vocab=256, length=128, qk_norm=True,
    experts=8, top_k=2, capacity_factor=1.25, balance=0.01,
)  # fmt: skip
"""Eight experts in each layer, of which a byte visits two, and a loss that balances them."""
GLOBAL_BATCH, MICROBATCHES, STEPS = 16, 2, 60


_TEXT: list[Tensor] = []


def text() -> Tensor:
    """The source of the standard library's top-level modules as bytes, read once per process."""
    if not _TEXT:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        _TEXT.append(
            torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
        )
    return _TEXT[0]


def batch(size: int, length: int, step: int, rows: range) -> tuple[Tensor, Tensor]:
    """Row r of a step starts at a place that depends on the step and r only: every strategy sees the same data."""
    source = text()
    picks = torch.randint(
        len(source) - length - 1, (size,), generator=torch.Generator().manual_seed(step)
    )
    windows = torch.stack(
        [source[i : i + length + 1] for i in picks[rows.start : rows.stop].tolist()]
    ).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def mixture(sizes: DecoderConfig, global_batch: int) -> piper.Job:
    """Return the job that trains a mixture of these sizes on the text, with a loss that balances experts."""
    # In float32, because a CPU may have no products of bfloat16. On GPUs leave `precision` out.
    made = piper.models.job(
        sizes, global_batch=global_batch, precision="float32", lr=2e-3, clip_norm=1.0
    )
    return replace(made, batch=partial(batch, global_batch, sizes.length))


job = mixture(SIZES, GLOBAL_BATCH)
strategy = piper.Strategy(
    piper.Mesh(ep=2),
    (
        *piper.recipes.expert_parallel(),  # each worker computes four of the eight experts, for the tokens of both
        piper.split(piper.where(), microbatches=MICROBATCHES),
        *piper.recipes.data_parallel(
            over=("dp", "ep"), bucket_mb=1
        ),  # everything else is on both, for rows of its own
    ),
)
steps = STEPS


def loop(work: piper.Job, options: RunOptions, settings: Settings, repeats: int = 7) -> Session:
    """Measure a job, predict its steps from that, train them, and put the two beside each other in a report."""
    from piper.sessions.training import session
    from piper_runtime.launch import open_pool

    with open_pool(options.launcher, strategy.mesh.world) as pool:
        print(f"profile on {strategy.mesh.world} ranks, launcher {options.launcher}", flush=True)
        rows = work.global_batch // strategy.mesh.world // MICROBATCHES
        costs = piper.profile(work, strategy, rows=[rows], repeats=repeats, pool=pool)
        return session(work, strategy, replace(options, pool=pool), replace(settings, costs=costs))


def unigram_entropy() -> float:
    """Nats per byte of the best model that ignores context: what training has to beat."""
    p = torch.bincount(text().long(), minlength=256).double() / len(text())
    return float(-(p * p.clamp_min(1e-300).log()).sum())


def main(launcher: Literal["ray", "processes"] = "ray") -> None:
    from piper.sessions.training import Settings
    from piper_runtime.launch import RunOptions

    options = RunOptions(steps=steps, launcher=launcher)
    done = loop(job, options, Settings(name="moe_text", out=Path("runs")))
    entropy, last = unigram_entropy(), sum(done.run.losses[-10:]) / 10
    print(
        f"loss {done.run.losses[0]:.3f} -> {last:.3f} nats per byte; unigram entropy of the text {entropy:.3f}"
    )
    if not last <= 0.95 * entropy:
        raise SystemExit(
            f"the final loss is not below 0.95 of the unigram entropy ({0.95 * entropy:.3f}): training went wrong"
        )


if __name__ == "__main__":
    main("processes" if "processes" in sys.argv[1:] else "ray")
