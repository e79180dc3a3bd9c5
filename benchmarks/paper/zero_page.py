"""Tabulate and draw the largest batches of pipelines with ZeRO, and write their section of docs/paper.md."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from benchmarks.measure import machine
from benchmarks.paper.page import markdown
from benchmarks.paper.zero_batches import (
    COMPARED,
    GIB,
    OOM,
    POLICIES,
    SMALLEST,
    SYSTEMS,
    Line,
    Point,
    Setting,
    System,
    missed,
)
from piper import models

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADER = (
    "system", "policy", "published", "simulated", "GiB at whole rows", "tokens/s",
    "all, for each", "products, for each", "inputs, for each",
)  # fmt: skip


def cells(line: Line) -> tuple[str, ...]:
    """Return a line as text, in the order of `HEADER`."""
    best = line.batches[line.system.policy].fits if line.reached else None
    published = str(line.system.published or OOM)
    own = (
        (OOM, "-", "-")
        if best is None
        else (f"{line.reached:.1f}", f"{best.device / GIB:.1f}", f"{best.tokens_per_s:,.0f}")
    )
    return (
        line.system.name,
        line.system.policy,
        published,
        *own,
        *(f"{line.batches[keep].batch:.1f}" for keep in POLICIES),
    )


LINES = (
    ("states", ("parameters", "master", "gradients", "optimizer", "buffers", "more")),
    ("gathered parameters", ("gathered_parameters",)),
    ("gradient buffers", ("gradient_buffers",)),
    (
        "activations and temporaries",
        (
            *(
                "activations",
                "recomputed_activations",
                "activation_gradients",
                "communication_buffers",
            ),
            *("logits_and_loss", "kernels", "update", "batch", "scalars"),
        ),
    ),
    ("allocator, context", ("allocator_reserve", "context")),
    ("communicators", ("group_communicators", "pair_communicators")),
)
"""The lines of memory of the second table."""


def split_cells(system: System, at: Point) -> tuple[str, ...]:
    """Return the memory of a system by line, in GiB."""
    sums = [sum(at.lines.get(name, 0) for name in names) for _, names in LINES]
    return (
        system.name,
        *(f"{s / GIB:.1f}" for s in (*sums, at.device)),
        "yes" if at.fits else "no",
    )


SPLIT_HEADER = ("GiB of the fullest device", *(name for name, _ in LINES), "in all", "fits")


def assumptions(s: Setting) -> list[tuple[str, str, str]]:
    """Return what is assumed, how much it is, and where it is from."""
    c, device = s.model, s.cluster.device
    artifact = "the paper's artifact (uw-syfi/piper at 4f992224: run_megatron.py, e2e_eval.py)"
    heads = f"{c.heads} heads of {c.width // c.heads}, {c.kv_heads} of keys and values"
    shape = (
        f"{c.layers} layers, width {c.width}, {heads}, {c.experts} experts of {c.hidden}, top "
        f"{c.top_k}, vocabulary {c.vocab:,}"
    )
    return [
        ("model", f"{shape}: {models.parameter_count(c) / 1e9:.2f}B parameters", artifact),
        (
            "tokens of experts",
            f"capacity factor {c.capacity_factor:g}: no expert is ever full, its places are padded",
            "assumed",
        ),
        (
            "mesh",
            f"pp={s.pp}, dp={s.dp}, no expert parallelism; stages of {c.layers // s.pp} layers",
            "the paper; stages assumed",
        ),
        (
            "where",
            f"{s.cluster.name}: replicas of a stage are neighbours, two stages on a node",
            "40 GB: the paper; assumed",
        ),
        ("schedule", f"1F1B, {s.microbatches} microbatches", artifact),
        (
            "what a batch is",
            f"rows of a microbatch, of {s.length} tokens",
            f"{artifact}; that it is the figure's: assumed",
        ),
        (
            "precision",
            "bf16 compute; float32 masters, AdamW's states, sums and reduction of gradients",
            "assumed, alike for all",
        ),
        *(
            (
                x.name,
                f"{x.keeps}; {x.policy!r}",
                "assumed" if x.published else "assumed; DeepSpeed's bf16 optimizer",
            )
            for x in SYSTEMS
        ),
        (
            "what our plan of FSDP2 keeps beyond it",
            "a bf16 shard and a shard of gradients: 1.5 bytes per parameter are taken off",
            "-",
        ),
        ("buckets", "25 MiB, or one parameter that is larger", "ours"),
        (
            "memory beside tensors",
            f"reserve {device.allocator_factor - 1:.0%}, context {device.context_bytes / GIB:.2f} "
            f"GiB, "
            f"{device.group_bytes / GIB:.2f} GiB per group, {device.p2p_bytes / GIB:.2f} per "
            f"neighbour and direction",
            "docs/memory.md",
        ),
        ("limit", f"{device.memory_bytes / GIB:.0f} GiB", "NVIDIA's A100 40 GB"),
        ("durations", "by formula, with contention; steady state", "docs/clusters.md"),
    ]


TEXT = """\
## Pipelines with ZeRO

Another figure shows the largest batch with which a mixture of 9B parameters trains on 32 A100 of 40 GB, with 8 stages
and 4 replicas. A pipeline with ZeRO-1 is out of memory at the smallest batch. The best other system runs batch 4 with
ZeRO-2 and 12 with ZeRO-3; Piper runs 32 and 40. `python benchmarks/paper/figure8.py --write` writes this section. The
machine was:
{machine}.

Each system is a plan of ours that keeps what the system keeps. A batch is the rows of a microbatch, with a decimal for
what is left on the device beside whole rows; batches below {smallest} count as out of memory. The last three columns have
the same policy of recomputation for all systems. The table is also in [figure8.csv](paper/figure8.csv). A policy is one
of `recompute`: "all" recomputes nothing, "inputs" everything.

{table}

![Largest batches, and memory at batch {batch} under one policy](paper/figure8.png)

{verdict}

- With the policies of the second column the order is that of the paper, and our plans take at least its batches. The
  batches of the other systems are not the paper's: what they recompute is not known, and the policies are assumed.
- Most of the distance between the other systems and ours is the policy. With one for all, the largest batches lie close
  together: what differs is how much of states and gradients a system keeps whole, and a row of activations is large
  beside that.
{one_policy}
- The same {batch} rows with the policy {keep!r}, by what fills the fullest device:

{split}

What is assumed:

{assumed}
"""


def one_policy(found: Sequence[Line]) -> str:
    """Return, as lines of a list, in which order the systems are when all have one policy, and whether it is the
    paper's."""
    published = [x.system.name for x in found]
    out = []
    for keep in POLICIES:
        ordered = sorted(found, key=lambda x: x.batches[keep].batch)
        same = [x.system.name for x in ordered] == published
        texts = ", ".join(f"{x.system.name} {x.batches[keep].batch:.1f}" for x in ordered)
        what = "is the paper's" if same else "is **not** the paper's"
        out.append(
            fill(
                f"- With the policy {keep!r} for all systems the order {what}: {texts}.",
                118,
                subsequent_indent="  ",
            )
        )
    return "\n".join(out)


def page(setting: Setting, found: Sequence[Line], split: Sequence[tuple[System, Point]]) -> str:
    """Return the text of the section of docs/paper.md."""
    wrong = missed(found)
    return TEXT.format(
        machine=fill(str(machine()), 118),
        smallest=SMALLEST,
        table=markdown(HEADER, [cells(x) for x in found]),
        batch=COMPARED[0],
        keep=COMPARED[1],
        verdict=f"Not as published: {'; '.join(wrong)}."
        if wrong
        else "The script checks the order, and that our plans take at least the paper's batches:",
        one_policy=one_policy(found),
        split=markdown(SPLIT_HEADER, [split_cells(*x) for x in split]),
        assumed=markdown(("what", "how much", "source"), assumptions(setting)),
    )


COLOURS = ("#33658a", "#86bbd8", "#2f4858", "#f6ae2d", "#bbbbbb", "#888888")


def draw(found: Sequence[Line], split: Sequence[tuple[System, Point]], path: Path) -> None:
    """Draw the largest batches, published and simulated, and the memory of each system at one batch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
    _batches(left, found)
    names = [system.name for system, _ in split]
    begin = [0.0] * len(split)
    for (title, parts), colour in zip(LINES, COLOURS, strict=True):
        sizes = [sum(at.lines.get(name, 0) for name in parts) / GIB for _, at in split]
        right.barh(names, sizes, 0.6, left=begin, color=colour, label=title)
        begin = [b + s for b, s in zip(begin, sizes, strict=True)]
    right.axvline(
        split[0][1].limit / GIB, color="black", linestyle="--", linewidth=1, label="the device"
    )
    right.set_xlabel(
        f"GiB of the fullest device: batch {COMPARED[0]}, policy {COMPARED[1]!r} for all"
    )
    right.set_xlim(0, 1.05 * max(split[0][1].limit / GIB, *begin))
    right.set_yticks([])
    right.invert_yaxis()
    right.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, fontsize=8, frameon=False
    )
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _batches(axis: Axes, found: Sequence[Line]) -> None:
    rows = range(len(found))
    for shift, values, colour, label in (
        (-0.2, [x.system.published for x in found], "#bbbbbb", "published"),
        (
            0.2,
            [round(x.reached, 1) for x in found],
            "#33658a",
            "simulated, with the system's policy",
        ),
    ):
        bars = axis.barh([k + shift for k in rows], values, 0.38, color=colour, label=label)
        axis.bar_label(bars, [f"{v:g}" if v else OOM for v in values], padding=3, fontsize=8)
    axis.set_yticks(rows, [f"{x.system.name}\n({x.system.policy!r})" for x in found])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.12 * max(x.reached for x in found))
    axis.set_xlabel("largest batch, rows of a microbatch")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, fontsize=8, frameon=False)


def write_table(path: Path, found: Sequence[Line]) -> None:
    """Write the first table as CSV, with the machine in a comment."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(f"# {machine()}\n")
        out = csv.writer(file, lineterminator="\n")
        out.writerow(HEADER)
        out.writerows(map(cells, found))
