"""Write docs/schedules.md and its pictures: every registered recipe compiled, simulated and drawn. `make gallery` runs
it.

All recipes train the same model: a recipe with v chunks per device cuts it into v times as many stages, each of 1/v of
the time and memory. Times are in units of a device's forward for one microbatch, F = I = W = 1 on a device; memory in
units of what a device keeps for one microbatch when the model is cut into p stages.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

from PIL import Image  # matplotlib needs it

from piper.views.recipe_view import ChunkTimes, Pipeline, SimulatedRecipe, shown
from piper_compiler.recipes import RECIPES
from piper_report import Drawing, draw_schedule, draw_schedules

PP, MICROBATCHES = 4, 8
HERE = Path(__file__).resolve().parent
PICTURES = HERE / "schedules"
FIRST = (
    "gpipe",
    "one_f_one_b",
    "looped_bfs",
    "interleaved",
    "zb_h1",
    "zb_h2",
    "interleaved_zb",
    "zbv",
    "dualpipe",
    "dualpipe_v",
)
"""The order of the page; further recipes follow by name."""
UNIT = 12
"""Bytes of a device's activation, so that it divides by 1, 2, 3 and 4 chunks."""
COLOURS = 64
"""Colours of a picture."""


def chunks_of(name: str) -> int:
    """Return the chunks per device: stages over devices."""
    found = shown(name, Pipeline(PP, MICROBATCHES))
    stages = len(found.compiled.plan.chunks)
    return max(1, stages // PP)


def simulated(name: str) -> SimulatedRecipe:
    v = chunks_of(name)
    each = ChunkTimes(1 / v, 1 / v, 1 / v)
    return shown(name, Pipeline(PP, MICROBATCHES), each, activation=UNIT // v)


def row(name: str, found: SimulatedRecipe) -> str:
    peaks = [x / UNIT for x in found.peaks]
    peak = (
        number(peaks[0])
        if len(set(peaks)) == 1
        else f"{number(max(peaks))} ({', '.join(map(number, peaks))})"
    )
    simulation = found.simulation
    cells = [
        f"[{name}](#{name})", number(simulation.step_s), number(simulation.global_bubble_s), f"{found.idle:.1%}",
        number(simulation.span_bubble_s), peak, RECIPES[name].use,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def number(x: float) -> str:
    return f"{x:.3f}".rstrip("0").rstrip(".")


def section(name: str) -> str:
    recipe = RECIPES[name]
    facts = [("Formula", recipe.formula), ("Peak", recipe.peak), ("Source", recipe.source)]
    lines = "\n".join(fill(f"- {k}: {v}", 118, subsequent_indent="  ") for k, v in facts if v)
    picture = f"![{name}](schedules/{name}.png)"
    return f"### {name}\n\n{picture}\n\n{lines}\n"


PAGE = """# Pipeline schedules

A pipeline schedule is a recipe, such as `piper.recipes.zbv(pp=4, microbatches=8)`. `piper recipes` lists them, and
this draws one, of any size and with any times:

    piper show --recipe zbv --pp 4 --microbatches 8 --times 1,1,1 --png zbv.png

The model needs at least as many layers as the recipe has stages. `make gallery` (docs/gallery.py) writes this page.

## Side by side

Every recipe is simulated for p = {pp} devices and m = {microbatches} microbatches, without communication time. One with
v chunks per device cuts the model into v times as many stages, each of 1/v of the time and memory. Times are in
forwards of a device's share for one microbatch, with F = I = W = 1; memory is in what a device keeps for one
microbatch. The *span* bubble, between a device's first and last instruction, is what remains in steady training.
DualPipe and DualPipeV pay where an overlapped pair takes less than F + B, with which they are drawn.

| recipe | makespan | bubble | of it | span bubble | peak activations (per device) | when to use it |
|---|---|---|---|---|---|---|
{table}

![All schedules below each other on one axis of time](schedules/all.png)

Blue is F, orange B, green I, purple W, each with its microbatch. A later chunk of a device is paler. A framed cell of
two halves is an overlapped pair.

## One by one

Letters: p devices, m microbatches, v chunks per device, group g; F, I, W, B = I + W and O (an overlapped pair) in
seconds of one chunk. A peak is in activations of a chunk, on device r. `piper recipes` says which sizes are legal.

{sections}
## Schedules of your own

Any order of actions is a schedule ([recipes](language.md#recipes)). `piper recipes FILE.py` lists those of a file,
`piper show FILE.py --recipe NAME` draws one, and `piper show FILE.csv` a table, with the durations of `--times`.
"""


def shrink(path: Path) -> None:
    """Write a picture with a palette: that is enough for a drawing, and a third of the bytes."""
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(COLOURS)
    small.save(path, optimize=True)


def main() -> None:
    names = [n for n in FIRST if n in RECIPES] + sorted(RECIPES.keys() - set(FIRST))
    found = {name: simulated(name) for name in names}
    PICTURES.mkdir(exist_ok=True)
    for old in PICTURES.glob("*.png"):
        old.unlink()
    drawings = []
    for name, one in found.items():
        trace, plan = one.simulation.trace, one.compiled.plan
        draw_schedule(trace, PICTURES / f"{name}.png", plan)
        drawings.append(Drawing(trace, plan, name))
    draw_schedules(drawings, PICTURES / "all.png")
    for path in PICTURES.glob("*.png"):
        shrink(path)
    table = "\n".join(row(name, one) for name, one in found.items())
    text = PAGE.format(
        pp=PP, microbatches=MICROBATCHES, table=table, sections="\n".join(map(section, names))
    )
    (HERE / "schedules.md").write_text(text)
    print(f"docs/schedules.md and {len(drawings) + 1} pictures in docs/schedules")


if __name__ == "__main__":
    main()
