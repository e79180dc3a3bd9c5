"""Find the effect of one word of a strategy, and changes that make a plan fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from piper.api.captures.capturing import captured_once
from piper.api.compiling.compiling import compile
from piper.api.ground.clusters import chosen_cluster
from piper.api.problems.other_meshes import used_recipe
from piper.api.problems.tuning_problem import Conditions, problem_of
from piper_autotune import OneWord, Scored, ScoredHere, WayOut
from piper_compiler import Options, Strategy, offload, order, recompute, replicate, shard, split
from piper_compiler.directives.offload import OPTIM, STATES
from piper_compiler.recipes import RECIPES, tensor_parallel
from piper_ir.ground.errors import PiperError, TuneError
from piper_ir.ground.keywords import checked_call
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.program.costs import Costs
from piper_ir.tools import size_text
from piper_simulator import Cluster, device_type

if TYPE_CHECKING:
    from piper_compiler import Directive
    from piper_ir.plan.plan import Plan
    from piper_runtime import Job

MOST_INSTRUCTIONS = 4_000
"""The most instructions of a plan that the event engine times again; the sweep, which is quicker, times larger ones."""
POLICIES = ("products", "attention", "inputs")
"""The policies of recomputation that are tried, from the one that keeps most."""
MOST_SEARCHED = 256
"""The most devices times microbatches for which other schedules are tried: some of them search for orders."""
SPARING = ("one_f_one_b", "v_half", "v_min")
"""The schedules that are tried in place of another, from the one that keeps most microbatches."""


@dataclass(frozen=True)
class Advice:
    """Hold the effects of other words of a strategy.

    Attributes:
        words: The effect of each single word that Piper tries of any strategy, whether it helps or not.
        way_out: The first change that makes a plan fit that does not; None for a plan that fits.
    """

    words: tuple[OneWord, ...] = ()
    way_out: WayOut | None = None

    def lines(self, period_s: float) -> list[str]:
        """Return the lines to print below a prediction of the period."""
        helpful = [word.told(period_s) for word in self.words if word.helps]
        text_lines = ["", "what one word would change", *helpful] if helpful else []
        said = self.way_out is None or self.way_out.change in self.words
        return (
            text_lines
            if said or self.way_out is None
            else [*text_lines, "", *_told(self.way_out, period_s)]
        )


@checked_call(TuneError)
def advice(
    job: Job,
    strategy: Strategy,
    cluster: str | Path | Cluster,
    costs: Costs | None = None,
    *,
    plan: Plan | None = None,
    contention: bool = True,
    options: Options | None = None,
) -> Advice:
    """Return the effects of other words of a strategy, and for a plan that does not fit, a way out.

    Args:
        job: The job to train.
        strategy: The strategy as it is.
        cluster: A cluster, its name, or its file, as in `simulate`.
        costs: Measured durations.
        plan: The plan of the strategy, if it is compiled already.
        contention: As in `simulate`.
        options: How the plan is compiled.

    Raises CaptureError, DirectiveError, CompileError or JobError if the strategy itself cannot be compiled.
    """
    chosen = chosen_cluster(cluster)
    assert chosen is not None, "a cluster was given"
    how = options or Options()
    with captured_once():
        compiled_plan = (
            plan
            or compile(
                job, strategy, costs=costs, options=replace(how, device=device_type(chosen))
            ).plan
        )
        limit = max(kind.device.memory_bytes for kind in chosen.kinds)
        conditions = Conditions(
            chosen, costs, limit, kernels=how.kernels, cuda_graph=how.cuda_graph
        )
        problem, more = problem_of(job, conditions)
        small = sum(len(role.program) for role in compiled_plan.roles) <= MOST_INSTRUCTIONS
        scored = ScoredHere(problem, more["at_rows"], more["under"], engine=contention and small)
        before = scored.score(strategy)
        if not isinstance(before, Scored):
            return Advice()
        words = scored.one_word(strategy, before)
        if not before.reason:
            return Advice(words)
        fitting = next((word for word in words if not word.after.reason), None)
        return Advice(
            words,
            scored.way_out(before, changes(strategy))
            if fitting is None
            else WayOut(fitting, len(words)),
        )


def changes(strategy: Strategy) -> Iterator[tuple[str, Strategy]]:
    """Yield strategies that hold less, each with its words: one change each, then the strongest together."""
    for kind in KINDS:
        yield from kind(strategy)
    said, changed = "", strategy
    for kind in TOGETHER:
        more = [(f"{said} and {words}" if said else words, other) for words, other in kind(changed)]
        if said:
            yield from more
        if more:
            said, changed = more[-1]


def _recomputing(strategy: Strategy) -> Iterator[tuple[str, Strategy]]:
    """Yield the policies of recomputation that keep less, if one holds for all that is recomputed."""
    asked = [d for d in strategy.directives if isinstance(d, recompute)]
    kept = {d.keep for d in asked}
    if len(kept) > 1 or not kept <= set(POLICIES):
        return
    for policy in POLICIES[POLICIES.index(kept.pop()) + 1 if kept else 0 :]:
        stronger = [replace(d, keep=policy) if d in asked else d for d in strategy.directives]
        yield (
            f'recompute(where(), keep="{policy}")',
            strategy.with_directives(
                stronger if asked else [*stronger, recompute(where(), policy)]
            ),
        )


def _sharing(strategy: Strategy) -> Iterator[tuple[str, Strategy]]:
    """Yield levels of ZeRO from 2 on, if there are replicas; level 1 is a word that is tried of any plan."""
    able = [d for d in strategy.directives if isinstance(d, replicate) and d.shard is None]
    able = [d for d in able if strategy.mesh.degree(d.over) > 1]
    levels: tuple[Literal[2, 3], ...] = (2, 3)
    for zero in (level for level in levels if able and all(level > d.zero for d in able)):
        yield (
            f"replicate(zero={zero})",
            strategy.with_directives(
                [replace(d, zero=zero) if d in able else d for d in strategy.directives]
            ),
        )


def _halved(strategy: Strategy) -> Iterator[tuple[str, Strategy]]:
    """Yield the strategy with twice the microbatches, if its recipe is known, or if no order stands for them."""
    if (twice := _twice(strategy)) is not None:
        yield f"half the rows per microbatch ({twice[0]})", strategy.with_directives(twice[1])


def _twice(strategy: Strategy) -> tuple[str, list[Directive]] | None:
    """Return the directives for twice the microbatches, with words; None if nobody knows them."""
    cuts, items = [d for d in strategy.directives if isinstance(d, split)], [*strategy.directives]
    if len(cuts) > 1 or (cuts and cuts[0].selection != where()):
        return None
    number = 2 * cuts[0].microbatches if cuts else 2
    known = used_recipe(strategy)
    if known is not None:
        pp = strategy.mesh.size("pp")
        try:
            recipe_directives = known.made(pp, number)
        except PiperError:  # its rule does not take this number
            return None
        return f"{known.recipe.name}(pp={pp}, microbatches={number})", [
            *items[: known.begin],
            *recipe_directives,
            *items[known.end :],
        ]
    if any(isinstance(d, order) for d in items):
        return None
    word = f"split(microbatches={number})"
    if cuts:
        return word, [replace(d, microbatches=number) if d is cuts[0] else d for d in items]
    return word, [*items, split(where(), microbatches=number)]


def _wider(strategy: Strategy) -> Iterator[tuple[str, Strategy]]:
    """Yield twice the devices along tp, half of those along dp if that is even, and the same rows each."""
    mesh = strategy.mesh
    tp, dp = 2 * mesh.size("tp"), mesh.size("dp")
    others = [(axis, size) for axis, size in mesh.sizes if axis not in ("tp", "dp")]
    shared = any(isinstance(d, shard) and d.over == "tp" for d in strategy.directives)
    twice = _twice(strategy) if dp % 2 == 0 else None
    word, items = twice or ("", [*strategy.directives])
    first = [] if shared else [*tensor_parallel()]
    if any(axis.startswith("tp.") for axis in mesh.axes):
        return
    try:
        sizes = (*others, ("tp", tp), ("dp", dp // 2 if dp % 2 == 0 else dp))
        wide = Mesh(sizes, mesh.order)
    except PiperError:  # more ranks than any mesh has
        return
    names = [f"tp={tp}", *([f"dp={dp // 2}"] if dp % 2 == 0 else []), *([word] if word else [])]
    yield ", ".join(names), Strategy(wide, [*first, *items])


def _ordered(strategy: Strategy) -> Iterator[tuple[str, Strategy]]:
    """Yield the schedules that keep fewer microbatches in flight, if the strategy's is known."""
    known, pp = used_recipe(strategy), strategy.mesh.size("pp")
    if known is None:
        return
    number = next(d.microbatches for d in strategy.directives if isinstance(d, split))
    if pp * number > MOST_SEARCHED:
        return
    for name in SPARING[
        SPARING.index(known.recipe.name) + 1 if known.recipe.name in SPARING else 0 :
    ]:
        try:
            recipe_directives = RECIPES[name].make(pp=pp, microbatches=number)
        except PiperError:  # its rule does not take these numbers
            continue
        items = [
            *strategy.directives[: known.begin],
            *recipe_directives,
            *strategy.directives[known.end :],
        ]
        yield f"{name}(pp={pp}, microbatches={number})", strategy.with_directives(items)


def _hosted(strategy: Strategy) -> Iterator[tuple[str, Strategy]]:
    """Yield the strategy with the optimizer on the host, then with parameters there, unless a part of these is."""
    items = strategy.directives
    if not any(isinstance(d, offload) and d.tensors in (OPTIM, STATES) for d in items):
        for tensors in (OPTIM, STATES):
            more = offload(where(), tensors=tensors)
            yield f'offload(where(), tensors="{tensors}")', strategy.with_directives([*items, more])


KINDS = (_recomputing, _sharing, _halved, _wider, _ordered, _hosted)
"""The kinds of changes, in the order in which they are tried."""
TOGETHER = (_recomputing, _sharing, _wider, _hosted, _halved)
"""The kinds of which the strongest are tried together: half the rows last, since there may be no half."""


def _told(found: WayOut, period_s: float) -> list[str]:
    """Return the lines that say how a plan can be made to fit."""
    if found.change is not None:
        return ["the first change that makes it fit", found.change.told(period_s)]
    least = found.least
    kinds = (
        "recomputation, zero, half the rows per microbatch, twice the tp, other schedules and the optimizer on the "
        "host"
    )
    nearest = (
        ""
        if least is None
        else f"; {least.words} holds least: {size_text(least.after.device_bytes)} on the fullest device"
    )
    return [
        f"none of {found.tried} changes of {kinds} makes it fit{nearest}. Take more devices per replica, or `piper "
        f"tune` a space"
    ]
