"""Draw docs/overview.png, the picture of README: a schedule as it is predicted, and the memory of each device under it.

`make gallery` runs this script. Nothing is executed: Llama 3 8B is captured without allocating it and simulated on four
H100s.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image  # matplotlib needs it

import piper
from piper_ir.ground.trace import Span
from piper_ir.plan.plan import COMPUTE, Instr
from piper_ir.program.ops import Compute

PP, MICROBATCHES, TOKENS = 4, 12, 4096
CLUSTER = "h100x4"
PICTURE = Path(__file__).resolve().parent / "overview.png"
PHASES = {
    "F": "forward",
    "I": "input gradient",
    "W": "weight gradient",
    "B": "input and weight gradient in one",
}
COLOURS = {"F": "#56B4E9", "I": "#009E73", "W": "#CC79A7", "B": "#E69F00"}
RANK_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#222222")
NARROWEST = 0.005
"""Share of the drawing's width that a digit of a cell's number needs."""
PALETTE = 64
"""Colours of the file: enough for a drawing, and a third of the bytes."""


def predicted() -> tuple[piper.Compiled, piper.Simulation]:
    """Compile and simulate Llama 3 8B in a zero-bubble pipeline of V shape."""
    job = piper.models.job("llama3-8b", global_batch=MICROBATCHES, length=TOKENS)
    strategy = piper.Strategy(
        piper.Mesh(pp=PP), piper.recipes.zbv(pp=PP, microbatches=MICROBATCHES, at="cost")
    )
    compiled = piper.compile(job, strategy)
    return compiled, piper.simulate(compiled.plan, CLUSTER)


def phase_of(instr: Instr) -> str:
    """Return F, I or W, B for I and W in one instruction, and "" for what computes no step of a chunk."""
    steps = {part.op.step for part in instr.parts if isinstance(part.op, Compute)}
    return "B" if steps == {"I", "W"} else "".join(steps)


def draw_schedule(ax: Axes, compiled: piper.Compiled, spans: Iterable[Span]) -> None:
    """Draw a row per rank and a cell per instruction that computes, with the number of its microbatch."""
    for rank in range(PP):
        ax.broken_barh(
            [(0, ax.get_xlim()[1])], (rank - 0.45, 0.9), facecolor="#F4F4F4", edgecolor="none"
        )
    for span in spans:
        instr = compiled.plan.role_of(span.rank).program[span.instr]
        if span.stream != COMPUTE or not (phase := phase_of(instr)):
            continue
        ax.broken_barh(
            [(span.start, span.end - span.start)],
            (span.rank - 0.45, 0.9),
            facecolor=COLOURS[phase],
            edgecolor="white",
            lw=0.5,
        )
        middle = (span.start + span.end) / 2
        number = str(instr.parts[0].mb)
        if span.end - span.start > NARROWEST * len(number) * ax.get_xlim()[1]:
            ax.text(middle, span.rank, number, ha="center", va="center_baseline", fontsize=7)
    ax.set_yticks(range(PP), [f"rank {r}" for r in range(PP)])
    ax.set_ylim(PP - 0.45, -0.55)


def draw_memory(ax: Axes, simulation: piper.Simulation) -> None:
    """Draw a line per rank: the bytes that its tensors hold while the step runs, with the peak."""
    for rank in range(PP):
        samples = sorted(
            (m for m in simulation.trace.memory if m.rank == rank), key=lambda m: m.time
        )
        held = [sum(m.bytes.values()) / 2**30 for m in samples]
        times = [m.time for m in samples]
        label = f"rank {rank}: peak {simulation.peak_bytes[rank] / 2**30:.1f} GiB"
        ax.step(
            [*times, simulation.step_s],
            [*held, held[-1]],
            where="post",
            color=RANK_COLOURS[rank],
            lw=1.3,
            label=label,
        )
    ax.set_ylim(bottom=0)
    ax.set_ylabel("memory (GiB)")
    ax.legend(loc="lower center", ncols=PP, frameon=False, fontsize=8)


def main() -> None:
    """Write the picture."""
    compiled, simulation = predicted()
    figure = Figure(figsize=(11, 4.4), dpi=110, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.2, 1])
    for ax in (above, below):
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8)
    below.set_xlim(0, simulation.step_s)
    what = f"Llama 3 8B, ZBV, {MICROBATCHES} microbatches of {TOKENS} tokens, four H100s"
    above.set_title(
        f"{what}: {simulation.step_s:.3f} s per step, predicted", loc="left", fontsize=10
    )
    draw_schedule(above, compiled, simulation.trace.spans)
    draw_memory(below, simulation)
    below.set_xlabel("seconds since the step began")
    used = {phase_of(i) for role in compiled.plan.roles for i in role.program}
    handles = [Patch(facecolor=COLOURS[p], label=text) for p, text in PHASES.items() if p in used]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8
    )
    figure.savefig(PICTURE, metadata={"Software": None})
    with Image.open(PICTURE) as picture:
        small = picture.convert("RGB").quantize(PALETTE)
    small.save(PICTURE, optimize=True)
    print("docs/overview.png")


if __name__ == "__main__":
    main()
