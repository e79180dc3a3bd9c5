"""Tabulate the paper's schedules and meshes of mixtures, and write their sections of docs/paper.md."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from benchmarks.measure import machine
from benchmarks.paper.page import items, markdown
from benchmarks.paper.schedule_changes import Change, Changed
from benchmarks.paper.schedule_dropless import dropless_text
from benchmarks.paper.schedule_lines import (
    MESHES,
    POINTS,
    RATE,
    RATIOS,
    STACKS,
    STEP,
    Line,
    Published,
    Setup,
    Tuned,
    ratio,
)
from piper import models
from piper_ir.tools import time_text
from piper_simulator import STACKS as KNOWN

LINE_HEADER = (
    "model",
    "devices",
    "schedule",
    "step",
    "tokens/s",
    "fullest device computes",
    "exposed messages",
    "fits",
)
RATIO_HEADER = (
    "model",
    "faster",
    "than",
    "published",
    "simulated",
    "points apart",
    "at most",
    "by other kernels",
)
GRID_HEADER = (
    "stages",
    "replicas",
    "devices",
    "tokens/s",
    "per device",
    "step",
    "published",
    "error",
)
TUNED_HEADER = ("model", "DualPipeV", "tuned", "faster by", "candidates", "plan")
WHY_HEADER = ("model", "what holds the critical path of the tuned plan", "time", "share")
CHANGE_HEADER = (
    "instead",
    "source",
    *(f"{p.model}: {p.faster}" for p in RATIOS),
    "furthest from the paper",
    "fits",
)
RATE_HEADER = ("instead", "source", "tokens/s", "error")
ARTIFACT = "the paper's artifact (uw-syfi/piper at 4f992224: run_megatron.py, e2e_eval.py)"
MOST = 5
"""The rows of a critical path that are shown."""


def line_cells(x: Line) -> tuple[str, ...]:
    """Return a schedule as text, in the order of `LINE_HEADER`."""
    found, s = x.found, x.setup
    times = (
        time_text(found.period_s),
        f"{x.tokens_per_s:,.0f}",
        time_text(x.fullest_s),
        time_text(found.exposed_comm_s),
    )
    return (s.model, str(s.pp * s.width), x.schedule, *times, "yes" if found.fits else "no")


def ratio_cells(
    p: Published, found: Sequence[Line], others: Sequence[Sequence[Line]]
) -> tuple[str, ...]:
    """Return a ratio beside the published one, in the order of `RATIO_HEADER`."""
    ours = ratio(found, p)
    (than,) = (x for x in found if (x.setup.model, x.schedule) == (p.model, p.than))
    most = 100 * (than.found.period_s / than.fullest_s - 1)
    more = ", ".join(f"{ratio(other, p):+.1f} %" for other in others)
    apart = f"{abs(ours - p.percent):.1f}"
    return (
        p.model,
        p.faster,
        p.than,
        f"{p.percent:+.0f} %",
        f"{ours:+.1f} %",
        apart,
        f"{most:+.0f} %",
        more,
    )


def verdicts(found: Sequence[Line]) -> str:
    """Return, as lines of a list, which ratios are as published, and what bounds the others."""
    out = []
    for p in RATIOS:
        ours = ratio(found, p)
        (than,) = (x for x in found if (x.setup.model, x.schedule) == (p.model, p.than))
        (faster,) = (x for x in found if (x.setup.model, x.schedule) == (p.model, p.faster))
        text = (
            f"- {p.model}: {p.faster} is {ours:+.1f} % faster than {p.than}, {p.percent:+.0f} % in "
            f"the paper: "
        )
        if abs(ours - p.percent) <= POINTS:
            text += f"within {POINTS:g} points."
        else:
            longer = faster.fullest_s - than.fullest_s
            alike = 100 * (than.found.period_s / (faster.found.period_s - longer) - 1)
            text += (
                f"**{abs(ours - p.percent):.1f} points apart**. The fullest device computes "
                f"{time_text(faster.fullest_s)} with "
                f"{p.faster} and {time_text(than.fullest_s)} with {p.than}. In the V it has both "
                f"the head and the "
                f"embedding, "
                f"whose gradient takes {time_text(faster.embedding_s)}; and a backward in two "
                f"parts has more kernels. "
                f"If that "
                f"cost nothing, the gain would be {alike:+.1f} %. The next table says what other "
                f"assumptions do."
            )
        out.append(text)
    return items(out)


def change_cells(x: Changed) -> tuple[str, ...]:
    """Return a change of the assumptions as text, in the order of `CHANGE_HEADER`."""
    ours = (f"{r:+.1f} %" for r in x.ratios)
    return (
        x.change.what,
        x.change.source,
        *ours,
        f"{max(x.apart):.1f} points",
        "yes" if x.fits else "no",
    )


def rate_cells(change: Change, x: Line) -> tuple[str, ...]:
    """Return the rate of a mesh under other assumptions, in the order of `RATE_HEADER`."""
    return (
        change.what,
        change.source,
        f"{x.tokens_per_s:,.0f}",
        f"{100 * (x.tokens_per_s / RATE[2] - 1):+.1f} %",
    )


def tuned_cells(x: Tuned, dual: Line) -> tuple[str, ...]:
    """Return what the tuner found beside DualPipeV, in the order of `TUNED_HEADER`."""
    rate = x.found.tokens_per_s or 0.0
    params = ", ".join(f"{k}={v}" for k, v in x.params.items())
    more = f"{100 * (rate / dual.tokens_per_s - 1):+.1f} %"
    return (
        x.setup.model,
        f"{dual.tokens_per_s:,.0f}",
        f"{rate:,.0f}",
        more,
        str(x.candidates),
        params,
    )


def why_cells(x: Tuned) -> list[tuple[str, ...]]:
    """Return the critical path of a plan by what holds it, as `piper simulate --why` shows it."""
    owned = [*x.why.path_by_owner.items()][:MOST]
    return [(x.setup.model, o.text, time_text(s), f"{s / x.why.step_s:.0%}") for o, s in owned]


def grid_cells(x: Line) -> tuple[str, ...]:
    """Return a mesh as text, in the order of `GRID_HEADER`."""
    s, devices = x.setup, x.setup.pp * x.setup.width
    pp, width, published = RATE
    known = (s.pp, s.width) == (pp, width)
    compared = (
        (f"about {published:,.0f}", f"{100 * (x.tokens_per_s / published - 1):+.1f} %")
        if known
        else ("-", "-")
    )
    rates = (
        f"{x.tokens_per_s:,.0f}",
        f"{x.tokens_per_s / devices:,.0f}",
        time_text(x.found.period_s),
    )
    return (str(s.pp), str(s.width), str(devices), *rates, *compared)


def grid_error(found: Sequence[Line]) -> float | None:
    """Return the error of the rate that the paper names, in percent; None without that mesh."""
    rates = [x.tokens_per_s for x in found if (x.setup.pp, x.setup.width) == RATE[:2]]
    return 100 * (rates[0] / RATE[2] - 1) if rates else None


SOURCES = {
    "eager": "the artifact compiles nothing when it compares schedules (e2e_eval.py)",
    "inductor": "the artifact may compile when it scales (e2e_eval.py, not by default; "
    "test_qwen.py does by default)",
}
"""Why these kernels are assumed."""


def assumptions(found: Sequence[Setup], stack: str = STACKS[0]) -> list[tuple[str, str, str]]:
    """Return what is assumed, how much it is, and where it is from."""
    out = []
    for s in {x.model: x for x in found}.values():
        c = s.config
        shape = (
            f"{c.layers} layers, width {c.width}, {c.experts} experts of {c.hidden}, top "
            f"{c.top_k}, vocabulary {c.vocab:,}"
        )
        out.append(
            (s.model, f"{shape}: {models.parameter_count(c) / 1e9:.2f}B parameters", ARTIFACT)
        )
    s = found[0]
    shared = (
        "`recipes.expert_parallel`: each of the ranks that have rows of their own has a part of "
        "the experts"
        if s.shared
        else "every rank has all experts: nothing is exchanged"
    )
    return [
        *out,
        (
            "rows",
            f"{s.length} tokens, {s.rows} rows to a microbatch, twice as many microbatches as "
            f"stages",
            ARTIFACT,
        ),
        (
            "experts",
            f"{shared}; as many places as tokens on average, none padded, load 1.0",
            "assumed: the paper trains without a bound, see below",
        ),
        (
            "where",
            "A100 of 40 GB, as many on a node as there are stages, HDR InfiniBand between; "
            "replicas of a stage are "
            "neighbours, "
            "so that 4 of them exchange within a node of 4 or 8, and the pipeline crosses nodes",
            "40 GB: the paper; the artifact has one replica on a node, see below",
        ),
        (
            "stages",
            "as many layers each; the head is with the last, on the device of the first in "
            "DualPipeV",
            "assumed",
        ),
        (
            "kernels",
            f"stack {stack!r}: {KNOWN[stack].source}",
            f"{SOURCES[stack]}; docs/clusters.md",
        ),
        (
            "data parallelism",
            "ZeRO-0, gradients in buckets of 25 MiB, reduced in float32 beside the backward",
            "assumed",
        ),
        (
            "precision",
            "bf16 compute; float32 masters and AdamW's states",
            "bf16: the paper; the rest assumed, see below",
        ),
        ("durations", "by formula, with contention; steady state", "docs/clusters.md"),
    ]


TEXT7 = """\
## Schedules of mixtures of experts

One figure compares schedules that train a mixture of 1B parameters on 32 A100 (8 stages) and one of 9B on 16 (4
stages), with 4 replicas that share the experts. `python benchmarks/paper/figure7.py --write` writes this section. The
machine was:
{machine}.

{lines}

![Tokens per second by schedule, and gains beside the published ones](paper/figure7.png)

"At most" is the gain at which the fullest device would compute without a pause. The last column has the same ratio with
the kernels of {others}.

{ratios}

{verdicts}
{kernels}

**What each assumption is worth.** One at a time is replaced by what the paper's artifact or its machine has, where that
differs; some rows replace several. The ratios are those of the table above, in its order. The files are those of
the artifact; what its authors changed between the figure and the artifact is not known. The kernels are those of the
artifact for just this comparison. Its precision, its placement and its experts without a bound are rows only.

{changes}

{conclusion}

{dropless}

**What the tuner finds.** The same rows, microbatches and mesh, with the schedule, the sizes of the stages, ZeRO and the
buckets as parameters: `piper tune`, {trials} trials.

{tuned}

{why}

What is assumed:

{assumed}
"""

TEXT9 = """\
## Larger meshes

Another figure scales the mixture of 1B parameters over 2, 4 and 8 stages and 2 and 4 replicas; on 8 x 4 it trains about
390,000 tokens per second. `python benchmarks/paper/figure9.py --write` writes this section. The machine was:
{machine}.

{grid}

![Tokens per second by mesh](paper/figure9.png)

{verdict}
{kernels}
- The schedule of the figure is not at hand; DualPipeV is assumed. With twice the stages there are twice the
  microbatches, so that the batch grows with the mesh.
- The 8 x 4 mesh under other assumptions, those of the artifact:

{rates}

- The head is as much work as several layers, and stays on one device: the more stages, the more of them wait for it.

What is assumed is what the section before this one assumes, but the kernels: stack '{stack}'.
"""


def other_stacks() -> str:
    """Return the names of the other kernels, for a sentence."""
    return " and ".join(f"`{name}`" if name else "no stack" for name in STACKS[1:])


def conclusion(found: Sequence[Changed]) -> str:
    """Return, as lines of a list, what the table of changes says."""
    out = []
    for k, p in enumerate(RATIOS):
        every = [x.ratios[k] for x in found]
        near = [x for x in found if abs(x.ratios[k] - p.percent) <= POINTS]
        out.append(
            f"- {p.model}, {p.faster} over {p.than}: {min(every):+.1f} to {max(every):+.1f} %, "
            f"{p.percent:+.0f} % in "
            f"the paper; "
            f"{len(near)} of {len(found)} rows are within {POINTS:g} points."
        )
    return items(out)


def kernels7(found: Sequence[Line], others: Sequence[Sequence[Line]]) -> str:
    """Return, as an item of a list, what the ratios would be with the kernels of meshes, and the rate with those
    here."""
    text = (
        f"- Kernels: those of `{STACKS[0]}` here, since {SOURCES[STACKS[0]]}; those of `{MESHES}` "
        f"in the next section, since "
    )
    text += f"{SOURCES[MESHES]}. The other way round, "
    if MESHES in STACKS[1:]:
        theirs = others[STACKS.index(MESHES) - 1]
        ours = [ratio(theirs, p) for p in RATIOS]
        near = sum(abs(r - p.percent) <= POINTS for r, p in zip(ours, RATIOS, strict=True))
        shown = ", ".join(f"{r:+.1f} %" for r in ours)
        text += (
            f"these ratios would be {shown} with `{MESHES}`: {near} of {len(ours)} within "
            f"{POINTS:g} points. "
        )
    error = grid_error([x for x in found if x.schedule == "DualPipeV"])
    if error is not None:
        text += f"There the rate would be {judged_rate(error)} with `{STACKS[0]}`."
    return items([text.strip()])


def kernels9(others: Sequence[tuple[Change, Line]]) -> str:
    """Return, as an item of a list, what the rate would be with the kernels of schedules."""
    rates = [
        x.tokens_per_s for change, x in others if change.stack == STACKS[0] and not change.fields
    ]
    text = f"- Kernels: those of `{MESHES}`, since {SOURCES[MESHES]}. "
    if rates:
        text += f"With those of `{STACKS[0]}`, as in the section before, the rate would be "
        text += f"{judged_rate(100 * (rates[0] / RATE[2] - 1))}. "
    text += "The section before says what its ratios would be with those of this one."
    return items([text])


def judged_rate(error: float) -> str:
    """Return the error of a rate, and whether it is small enough."""
    return (
        f"{error:+.1f} % beside the paper's, "
        f"{'within' if abs(error) <= STEP else '**not** within'} {STEP:g} %"
    )


def page7(
    found: Sequence[Line],
    others: Sequence[Sequence[Line]],
    changes: Sequence[Changed],
    best: Sequence[Tuned],
    trials: int,
) -> str:
    """Return the section about schedules."""
    dual = {x.setup.model: x for x in found if x.schedule == "DualPipeV"}
    return TEXT7.format(
        machine=fill(str(machine()), 118),
        lines=markdown(LINE_HEADER, [line_cells(x) for x in found]),
        others=other_stacks(),
        ratios=markdown(RATIO_HEADER, [ratio_cells(p, found, others) for p in RATIOS]),
        verdicts=verdicts(found),
        kernels=kernels7(found, others),
        dropless=dropless_text(changes),
        changes=markdown(CHANGE_HEADER, [change_cells(x) for x in changes]),
        conclusion=conclusion(changes),
        trials=trials,
        tuned=markdown(TUNED_HEADER, [tuned_cells(x, dual[x.setup.model]) for x in best]),
        why=markdown(WHY_HEADER, [row for x in best for row in why_cells(x)]),
        assumed=markdown(("what", "how much", "source"), assumptions([x.setup for x in found])),
    )


def page9(found: Sequence[Line], others: Sequence[tuple[Change, Line]]) -> str:
    """Return the section about meshes."""
    error = grid_error(found)
    if error is None:
        verdict = "The mesh of the paper's number is not among these."
    else:
        verdict = f"- At 8 x 4 the rate is {judged_rate(error)}."
    table = markdown(GRID_HEADER, [grid_cells(x) for x in found])
    rates = markdown(RATE_HEADER, [rate_cells(*x) for x in others])
    machine_text = fill(str(machine()), 118)
    return TEXT9.format(
        machine=machine_text,
        grid=table,
        verdict=verdict,
        kernels=kernels9(others),
        rates=rates,
        stack=MESHES,
    )
