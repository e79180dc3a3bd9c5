"""Simulate the interference figure of the paper that Piper follows (arXiv 2606.11169).

It shows an all-to-all beside a reduction.

    python benchmarks/paper/figure4.py                     the table; no GPU is needed, and nothing runs but the simulator
    python benchmarks/paper/figure4.py --cluster a100x2*2  on a cluster of your own, ranks 0 and `per node` of it
    python benchmarks/paper/figure4.py --write             docs/paper.md and its picture as well

What is assumed is listed below the table, each with its source. Where the paper's number is not known, "not given"
stands.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

if __name__ == "__main__":  # run as a file, sys.path begins with this folder and not with the root
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from rich.console import Console

from benchmarks.measure import machine
from benchmarks.paper.page import ROOT, markdown, printed, write_section
from benchmarks.paper.stage import MIB, OPTIONS, Option, Ran, Setting, pair, step
from piper_ir.ground.errors import ClusterError, PiperError
from piper_simulator import load_cluster

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAPER = 1.46
"""How many times as long an all-to-all beside a data-parallel all-reduce takes, by the paper."""
NOT_GIVEN = "not given"
CLUSTERS = ("h100x2*2", "a100x2*2", "h100x4")
PIECES_MB = (25, 4)
REACHED = ((16, 0.52), (32, 0.63), (64, 0.72))
"""The part of the NICs' rate that an all-to-all of 16 GPUs on two nodes reached, by MiB.

Source: SimAI, inputs/ratio/ata_ratio.csv at commit cef83f9ddd (MIT).
"""
PAGE, PICTURE = ROOT / "docs" / "paper.md", ROOT / "docs" / "paper" / "figure4.png"
WIDTH = 150


def setting(cluster: str, **more: float) -> Setting:
    """Return two ranks of a cluster: of two nodes, one on each; of one node, its first and the one half a node on.

    ClusterError for a cluster without two devices, and for one of CPUs.
    """
    found = load_cluster(cluster)
    if found.devices < 2 or found.synchronous:
        raise ClusterError(
            f"{found.name} has no two devices with links between them; give one such as "
            f"{CLUSTERS[0]}"
        )
    apart = found.per_node if found.node_count > 1 else max(1, found.devices // 2)
    return replace(Setting(found, (0, apart)), **more)


@dataclass(frozen=True)
class Line:
    """Hold a line of the table, in seconds.

    They are those of the all-to-all of the pair, and in a step: of an all-to-all (from ready to end) and of a layer in
    the last backward, and of all. `alone` is the line without a reduction.
    """

    cluster: str
    option: str
    pair_s: float
    exchange_s: float
    layer_s: float
    step_s: float
    alone: Line | None = None

    def times(self) -> tuple[float, float, float, float]:
        """Return how many times as long as alone."""
        of = self.alone or self
        return (
            self.pair_s / of.pair_s, self.exchange_s / of.exchange_s, self.layer_s / of.layer_s, self.step_s / of.step_s
        )  # fmt: skip

    @property
    def paper(self) -> float | None:
        """Return what the paper says of the option."""
        return PAPER if self.option == "separate streams" else None


def last(s: Setting) -> str:
    """Return how the names of the last backward begin."""
    return f"B{s.microbatches - 1}."


def line(s: Setting, option: Option, alone: Line | None) -> Line:
    one, whole = pair(s, option), step(s, option)
    layers = (whole.until(f"{last(s)}0.attention") - whole.until(f"{last(s)}head")) / s.layers
    title = f"{option}, {s.bucket_mb} MiB" if option.startswith("partitioned") else option
    found = Line(
        s.cluster.name, title, one.exchange_s("B"), whole.exchange_s(last(s)), layers, whole.step_s
    )
    return replace(found, alone=alone)


def lines(cluster: str) -> Iterator[Line]:
    """Return the lines of a cluster: each option, the partitioned ones with each size of pieces."""
    s, alone = setting(cluster), None
    for option in OPTIONS:
        for mb in PIECES_MB if option.startswith("partitioned") else (s.bucket_mb,):
            found = line(replace(s, bucket_mb=mb), option, alone)
            alone = alone or found
            yield found


def reached(cluster: str) -> Iterator[tuple[str, float, float]]:
    """Return how many times as long an all-to-all takes beside the reduction, by what it reaches of its link alone."""
    s = setting(cluster)
    nbytes = s.exchanged
    wire = nbytes / 2 / s.cluster.links.inter_bandwidth
    yield f"by formula, {nbytes / MIB:.0f} MiB", wire / s.seconds("all_to_all", nbytes), _slower(s)
    for mib, part in REACHED:
        yield f"SimAI, {mib} MiB", part, _slower(replace(s, reached=part))
    yield "that gives the paper's number", PAPER / 2, _slower(replace(s, reached=PAPER / 2))


def _slower(s: Setting) -> float:
    return pair(s, "separate streams").exchange_s("B") / pair(s, "alone").exchange_s("B")


def assumptions(clusters: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return what is assumed, how much it is, and where it is from."""
    s = setting(clusters[0])
    c, mb = s.config, 1e6
    links = "; ".join(_links(setting(name)) for name in clusters)
    artifact = "the paper's artifact (uw-syfi/piper at 4f992224: run_megatron.py, e2e_eval.py)"
    return [
        (
            f"what is {PAPER} times as long",
            "the all-to-all, from ready to end",
            "only the number was at hand, not the figure",
        ),
        ("machine, links", links, "not given; docs/clusters.md"),
        (
            "model",
            f"{s.model}: {c.layers} layers, width {c.width}, {c.experts} experts, top {c.top_k}",
            artifact,
        ),
        (
            "is this the figure's model",
            "the one of the artifact's runs with ep=2",
            "not given; assumed",
        ),
        (
            "mesh",
            f"pp=2, dp=2, ep=2: stages of {s.layers} layers; a pair of ranks exchanges and reduces",
            artifact,
        ),
        (
            "where the pair is",
            "on two nodes, the pipeline within a node; in the last case on one",
            "the artifact's layout: dp nodes of pp GPUs",
        ),
        ("microbatch", f"{s.rows} rows of {s.length} tokens, {s.microbatches} per step", artifact),
        (
            "bytes of an all-to-all",
            f"{s.exchanged / mb:.1f} MB per rank: tokens x top k x width x 2",
            "bf16, balanced: assumed",
        ),
        (
            "bytes of the reductions",
            f"head {s.head / mb:.0f} MB, then {s.dense / mb:.1f} MB per layer",
            "bf16, a bucket each: assumed",
        ),
        (
            "which stage",
            "the last, without the pipeline's bubble: its head is reduced beside all of its layers",
            "assumed",
        ),
        (
            "compute",
            "matrix products and attention, by formula, at the reached peak",
            "docs/clusters.md",
        ),
        ("durations alone", "all-to-all and all-reduce by formula", "docs/decisions/0014"),
        (
            "sharing",
            "max-min fair on each link; compute loses SMs and memory bandwidth",
            "docs/decisions/0013",
        ),
        (
            "left out",
            "norms and element-wise work, router, token permutation, optimizer, ZeRO's gather",
            "-",
        ),
    ]


def _links(s: Setting) -> str:
    c = s.cluster
    rate = (
        c.links.inter_bandwidth
        if c.node_of(s.members[0]) != c.node_of(s.members[1])
        else c.links.intra_bandwidth
    )
    return f"{c.name}: {rate / 1e9:g} GB/s per device and direction"


HEADER = (
    "cluster", "option", "pair: all-to-all ms", "x alone", "paper", "error",
    "step: all-to-all ms", "x alone", "layer ms", "x alone", "step ms", "x alone",
)  # fmt: skip


def cells(of: Line) -> tuple[str, ...]:
    """Return a line as text, in the order of `HEADER`."""
    one, mean, layer, whole = of.times()
    paper = "-" if of.alone is None else NOT_GIVEN if of.paper is None else f"{of.paper:.2f}"
    error = "-" if of.paper is None else f"{100 * (one / of.paper - 1):+.0f} %"
    return (
        of.cluster, of.option, f"{1e3 * of.pair_s:.3f}", f"{one:.2f}", paper, error,
        f"{1e3 * of.exchange_s:.3f}", f"{mean:.2f}", f"{1e3 * of.layer_s:.3f}", f"{layer:.2f}",
        f"{1e3 * of.step_s:.1f}", f"{whole:.3f}",
    )  # fmt: skip


TEXT = """\
## Interference

One figure shows an all-to-all of experts that becomes 1.46 times as long beside the all-reduce of data parallelism,
since both use the same links. It also shows what a strategy can do about that. `python benchmarks/paper/figure4.py
--write` writes this section. The machine was:
{machine}.

The table has two cases:

- *pair*: one all-to-all and the reduction of the head's gradients, both ready at once.
- *step*: a whole step of a stage. The all-to-all (from ready to end, mean) and the layer are those of its last
  backward, beside which gradients are reduced.

{table}

![Slowdown by option, and the last backward of a step](paper/figure4.png)

- Two messages that each want all of a link get half of it: they take 2 times as long, less what is latency. The
  paper's {paper} is less than that. In this model there are two ways for an all-to-all to become that long: it
  reaches {half:.0f} % of its link alone, or it meets the reduction for {part:.0f} % of its time only. Which one it is
  cannot be told without its bytes and its machine. What others measured of all-to-alls on two nodes gives the range
  below. Nothing is fitted: where a line comes close to {paper}, its setting may still not be the paper's.
- On one stream an all-to-all waits for the bucket before it. That is worse than sharing wherever a bucket is longer
  than an all-to-all.
- Pieces let it wait for one of them at most. Where one has just begun (the pair), that costs less than sharing only
  if a piece is shorter than the all-to-all. In a step, pieces also find room beside compute, where nothing meets
  them, if there is enough of it. Small pieces cost latency, which the end of the reduction pays.

{reached}

What is assumed:

{assumed}
"""


def page(rows: Sequence[Line], clusters: Sequence[str]) -> str:
    """Return the text of the section of docs/paper.md."""
    part = 100 * 2 * (PAPER - 1) / PAPER  # half as fast for t: t / 2 + (1.46 - t) = 1, t / 1.46
    header = (
        "an all-to-all on two nodes",
        "part of its link that it reaches alone",
        "x alone beside the reduction",
    )
    return TEXT.format(
        machine=fill(str(machine()), 118),
        table=markdown(HEADER, [cells(x) for x in rows]),
        paper=PAPER,
        half=100 * PAPER / 2,
        part=part,
        reached=markdown(
            header, [(name, f"{u:.2f}", f"{x:.2f}") for name, u, x in reached(clusters[0])]
        ),
        assumed=markdown(("what", "how much", "source"), assumptions(clusters)),
    )


def draw(rows: Sequence[Line], path: Path, cluster: str) -> None:
    """Draw at the left times as long as alone, by option; at the right the last backward of a step on `cluster`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(13, 5), width_ratios=(2, 3), layout="constrained"
    )
    names = list(dict.fromkeys(x.option for x in rows if x.alone))
    clusters = list(dict.fromkeys(x.cluster for x in rows))
    for k, (name, colour) in enumerate(zip(clusters, ("#33658a", "#86bbd8", "#f6ae2d"))):
        found = [x for x in rows if x.cluster == name and x.alone]
        left.barh(
            [i + 0.27 * (k - 1) for i in range(len(found))],
            [x.times()[1] for x in found],
            0.25,
            color=colour,
            label=name,
        )
    left.axvline(
        PAPER,
        color="black",
        linestyle="--",
        linewidth=1,
        label=f"paper: {PAPER} beside the all-reduce",
    )
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.set_xlabel("all-to-all, mean of the last backward: x alone, with its wait")
    left.legend(loc="lower right", fontsize=8)
    s = setting(cluster)
    for k, option in enumerate(OPTIONS):
        of = replace(s, bucket_mb=PIECES_MB[-1])
        _timeline(right, k, step(of, option), last(of))
    right.set_yticks(range(len(OPTIONS)), [x.replace(", ", ",\n") for x in OPTIONS])
    right.invert_yaxis()
    right.set_xlabel(
        f"ms since the head's backward; {s.cluster.name}, pieces of {PIECES_MB[-1]} MiB"
    )
    right.legend(loc="lower right", fontsize=8)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


COLOURS = (("compute", "#bbbbbb"), ("exchange", "#f26419"), ("reduce", "#33658a"))


def _timeline(axis: Axes, k: int, ran: Ran, prefix: str) -> None:
    """Draw compute, all-to-alls and reductions since the head's backward, one above the other."""
    begin = ran.until(f"{prefix}head")
    for j, (kind, colour) in enumerate(COLOURS):
        spans = [(1e3 * (a - begin), 1e3 * (b - a)) for _, _, a, b in ran.spans(kind) if b > begin]
        label = (
            {"exchange": "all-to-all", "reduce": "all-reduce"}.get(kind, kind) if k == 1 else None
        )
        edges = {"edgecolor": "white", "linewidth": 0.2}
        axis.broken_barh(spans, (k - 0.4 + 0.27 * j, 0.25), facecolor=colour, label=label, **edges)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--cluster",
        action="append",
        help="of at least two devices, e.g. h100x2*2; several times for several",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="docs/paper.md and its picture, of the built-in clusters",
    )
    options = parser.parse_args(argv)
    clusters = CLUSTERS if options.write else tuple(options.cluster or CLUSTERS)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    try:
        rows = [x for name in clusters for x in lines(name)]
    except PiperError as e:
        print(e, file=sys.stderr)
        return 2
    console.print(f"{machine()}", highlight=False)
    printed(
        console, "An all-to-all beside a data-parallel all-reduce", HEADER, [cells(x) for x in rows]
    )
    printed(console, "Assumed", ("what", "how much", "source"), assumptions(clusters))
    if options.write:
        write_section(PAGE, "figure4", page(rows, clusters))
        draw(rows, PICTURE, CLUSTERS[0])
        console.print(f"{PAGE.relative_to(ROOT)}, {PICTURE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
