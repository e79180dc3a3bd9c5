"""Compute content keys of many plans, to show that a change of the compiler changes no plan.

python benchmarks/plan_keys.py                      one line per case: family, case, key
python benchmarks/plan_keys.py random overlaps      some families
python benchmarks/plan_keys.py --json               one hash per family, as tests/house/plan_keys.json keeps them
python benchmarks/plan_keys.py --check              compare with that file; exit code 1 for a family that differs
python benchmarks/plan_keys.py --text               keys of text and peaks alone, for trees that write other JSON

A key hashes the text of a plan, its JSON and the peaks of its roles; where a plan is refused, the message. Compare two
trees with `diff`.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

if __name__ == "__main__":  # run as a file, sys.path begins with this folder and not with the root
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import piper
from packages.compiler.tests.compile_cases import RandomProgram, frozen_first, layered, random_case
from piper.cli.loading import load_file
from piper_compiler import (
    Options,
    Strategy,
    Training,
    compile_program,
    order,
    overlap,
    place,
    recipes,
    split_backward,
    synthetic,
)
from piper_compiler.recipes import RECIPES
from piper_ir.ground.errors import PiperError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.plan.plan import DeviceType, Plan
from piper_ir.plan.text import format_plan
from piper_ir.program.program import Program

Case = tuple[str, Callable[[], Plan]]
"""A name, and what makes the plan."""

SIZES = {"small": (2, 8), "middle": (4, 12), "large": (6, 24)}
"""Devices and microbatches: all recipes accept them."""
GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "house" / "plan_keys.json"
DEVICES: tuple[DeviceType, ...] = ("", "cpu", "cuda")
RANDOM = range(120)
COMPOSED = range(80)
COMPOSED_MODELS = (
    *("branches", "buffers", "counter", "custom_op", "frozen", "gpt", "gpt_dropout"),
    *("gpt_untied", "in_place", "keywords", "llama", "opaque", "skip", "slices"),
)
"""Models of `tests/helpers/models.py`, written out: a model that is added there draws no other cases here."""
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def _compiled(program: Program, strategy: Strategy, **more: Any) -> Plan:
    return compile_program(program, strategy, **more).plan


def recipe_cases(size: str) -> Iterator[Case]:
    """Yield every recipe at one size.

    It is put on a chain of given durations, on layers with replicas and a clipped norm, on a random DAG, and on frozen
    first stages.
    """
    pp, microbatches = SIZES[size]
    training = Training(clip=1.0, state_bytes=lambda bucket: 8 * bucket.numel)
    ours = (
        name
        for name, known in RECIPES.items()
        if known.make.__module__.startswith("piper_compiler.")
    )
    for name in sorted(
        ours
    ):  # a file that was loaded in this process may have added some of its own
        directives = RECIPES[name].make(pp=pp, microbatches=microbatches)
        stages = 1 + max(
            dict(d.selection.terms).get("stage", 0) for d in directives if isinstance(d, place)
        )
        replicated = (*directives, *recipes.data_parallel(bucket_mb=0.001))
        drawn = RandomProgram(Random(stages * microbatches), stages).build()
        chain = synthetic(stages=stages, F=3, I=4, W=2, params=100)
        head = f"{name} pp={pp} m={microbatches}"
        yield f"{head} chain", partial(_compiled, chain, Strategy(Mesh(pp=pp), directives))
        layers = Strategy(Mesh(pp=pp, dp=2), replicated)
        yield f"{head} layers", partial(_compiled, layered(stages + 3), layers, training=training)
        yield (
            f"{head} random",
            partial(_compiled, drawn, Strategy(Mesh(pp=pp), directives), training=training),
        )
        unfused = Options(fuse=False)
        yield (
            f"{head} frozen",
            partial(
                _compiled, frozen_first(stages), Strategy(Mesh(pp=pp), directives), options=unfused
            ),
        )


def random_cases() -> Iterator[Case]:
    """Yield random DAGs with buffers, tied and frozen weights.

    Placements are by stage and by microbatch, V and double; orders are partial and total; with and without fusion,
    receives posted early or late.
    """
    for seed in RANDOM:
        case = random_case(seed)
        options = Options(fuse=seed % 3 > 0, recv_ahead=seed % 4, device=DEVICES[seed % 3])
        more: dict[str, Any] = {
            "global_batch": case.global_batch,
            "training": case.training,
            "options": options,
        }
        yield f"seed {seed}", partial(_compiled, case.program, case.strategy, **more)


def overlap_cases() -> Iterator[Case]:
    """Yield overlaps whose pairs have a duration of their own, and overlaps that the compiler interleaves."""
    for seed in range(24):
        rng = Random(seed)
        microbatches = rng.randint(2, 5)
        pair = where(stage=0, mb=1, phase="F"), where(stage=0, mb=0, phase="B" if seed % 2 else "I")
        orders = [order(where(stage=0, mb=0, phase="F"), overlap(*pair))]
        first = recipes.pipeline(pp=2, microbatches=microbatches)
        apart = () if seed % 2 else (split_backward(where()),)
        at = next(k for k, d in enumerate(first) if isinstance(d, place))
        directives = (*first[:at], *apart, *first[at:], *orders)
        given = synthetic(stages=2, F=3, I=4, W=2, params=100, overlap=7 if seed % 3 else None)
        free = RandomProgram(rng, 2).build()
        for kind, program in (("given", given), ("free", free)):
            yield (
                f"seed {seed} {kind}",
                partial(_compiled, program, Strategy(Mesh(pp=2), directives)),
            )


def _composed(drawn: Any) -> Plan:
    from tests.helpers import compositions

    return compositions.compiled(compositions.fitted(drawn)).plan


def composed_cases() -> Iterator[Case]:
    """Yield captured models under random compositions.

    They have tied weights, buffers, masked losses, mixed splits of backwards, and overlaps.
    """
    from tests.helpers import compositions

    for seed in COMPOSED:
        rng = Random(seed)
        drawn = compositions.Composition(
            model=rng.choice(COMPOSED_MODELS),
            pp=rng.randint(1, 4),
            dp=rng.choice((1, 1, 2)),
            microbatches=rng.randint(1, 5),
            schedule=rng.choice(("gpipe", "1f1b", "default", "random", "random")),
            placement=rng.choice(("recipe", "chunks", "v", "shared", "random")),
            clip=rng.choice((None, 1.0)),
            bucket_mb=rng.choice((25, 0.0005)),
            shared_streams=rng.random() < 0.3,
            fuse=rng.random() < 0.7,
            recv_ahead=rng.randint(0, 3),
            backward=rng.choice(("whole", "split", "mixed")),
            overlap=rng.random() < 0.3,
            seed=seed,
        )
        yield f"seed {seed} {drawn.model}", partial(_composed, drawn)


def example_cases() -> Iterator[Case]:
    """Yield the examples, with the strategy that each has for its parameters.

    The large ones are captured here, which takes seconds.
    """
    for path in sorted(EXAMPLES.glob("*.py")):
        yield path.stem, partial(_example, path)


def _example(path: Path) -> Plan:
    found = load_file(path)
    return piper.compile(found.job, found.strategy).plan


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    **{f"recipes-{size}": partial(recipe_cases, size) for size in SIZES},
    "random": random_cases,
    "overlaps": overlap_cases,
    "composed": composed_cases,
    "examples": example_cases,
}


def key(make: Callable[[], Plan], text_only: bool = False) -> str:
    """Return the key of a plan, or of the message with which it is refused."""
    try:
        plan = make()
    except PiperError as e:
        # without the tree's place, and without the lines that wrote the directives
        message = re.sub(r"(\w+\.py):\d+", r"\1", str(e).replace(str(GOLDEN.parents[2]), ""))
        return "refused " + _hash(f"{type(e).__name__}: {message}")
    peaks = [(r.role, r.peak_bytes, r.peak_at, dict(r.peak_by_category)) for r in plan.roles]
    return _hash(f"{format_plan(plan)}{peaks}{'' if text_only else plan.key}")


def keys(family: str, text_only: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the cases of a family with their keys."""
    for name, make in FAMILIES[family]():
        yield name, key(make, text_only)


def family_key(family: str) -> str:
    """Return one hash for all cases of a family."""
    return _hash(repr(list(keys(family))))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main(argv: list[str]) -> int:
    """Print the keys of the families that are named, or of all; exit code 1 when `--check` found a difference."""
    families = [name for name in argv if not name.startswith("--")] or list(FAMILIES)
    if "--json" in argv:
        print(json.dumps({family: family_key(family) for family in families}, indent=2))
        return 0
    if "--check" in argv:
        golden = json.loads(GOLDEN.read_text())
        differ = [family for family in families if family_key(family) != golden[family]]
        print(f"{len(families)} families, different: {', '.join(differ) or 'none'}")
        return int(bool(differ))
    for family in families:
        for name, found in keys(family, "--text" in argv):
            print(f"{family:14} {name:44} {found}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
