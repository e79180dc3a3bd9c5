"""The rules against exhaustive evaluation: what they reject does not fit or is slower, and their bounds are bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import FixedTrial

from packages.autotune.tests.tuner_spaces import exhaustive, problem, program, strategy
from packages.compiler.tests.compile_cases import random_case
from piper_autotune import NothingFoundError, tune
from piper_autotune.scoring.scoring import Scored, score
from piper_autotune.space.flights import in_flight
from piper_autotune.space.problem import Programs, TuningProblem, Wanted
from piper_autotune.space.rules import RULES, PruningRules
from piper_autotune.space.sketch import Sketch, Sketches
from piper_compiler import (
    Strategy,
    Training,
    directive,
    directives,
    order,
    overlap,
    partition,
    place,
    recipes,
    split,
    synthetic,
)
from piper_compiler.directives import site_field
from piper_ir.graph.graph import Graph
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.program.costs import AllocatorCosts, Costs, HostCosts
from piper_ir.program.program import Cost, Kernel, Program, Signature
from piper_ir.tools import enough_text
from piper_simulator import Cluster, cpu_local, load_cluster


def rules(of: TuningProblem) -> PruningRules:
    return PruningRules(of, Programs(of, None))


def states(found: Sketches, sketch: Sketch) -> int:
    return max(found.state_bytes(sketch).values())


def filled(found: Sketches, sketch: Sketch, rows: int) -> tuple[int, str]:
    """The bytes of the fullest role, and which it is."""
    return max((nbytes, role) for role, (nbytes, _) in found.filled_bytes(sketch, rows).items())


def least_s(found: Sketches, chosen: Strategy, sketch: Sketch, rows: int) -> float:
    """The largest bound of the seconds of a step."""
    return max(found.computing_s(chosen, sketch, rows)[0], found.messages_s(sketch, rows))


def test_what_is_pruned_does_not_fit_and_each_memory_rule_is_of_use() -> None:
    everything = exhaustive(problem())
    seen: set[str] = set()
    for limit in sorted({s.peak_bytes - 1 for _, s in everything}):
        judge = rules(problem(limit))
        for made, exact in everything:
            pruned = judge.check(made)
            if pruned is not None:
                assert (
                    pruned.device_bytes is not None
                    and limit < pruned.device_bytes <= exact.device_bytes
                )
                seen.add(pruned.rule)
    assert seen == {"states", "activations"}


def test_what_is_pruned_as_slower_is_slower() -> None:
    everything, judge = exhaustive(problem()), rules(problem())
    known = sorted(s.period_s for _, s in everything)
    count = 0
    for bound in known[:: len(known) // 6]:
        for made, exact in everything:
            pruned = judge.check(made, bound)
            if pruned is not None:
                count += 1
                assert pruned.rule == "slower" and exact.period_s >= (pruned.period_s or 0) * (
                    1 - 1e-9
                ) > bound * (1 - 1e-9)
    assert count > 20


@given(st.randoms(use_true_random=False))
def test_bounds_hold_for_random_programs_and_strategies(draw: Any) -> None:
    stages = draw.randint(1, 4)

    def some(low: int, high: int) -> Sequence[int]:
        return [draw.randint(low, high) for _ in range(stages)]

    made = synthetic(
        stages=stages,
        F=some(0, 5),
        I=some(0, 5),
        W=some(0, 5),
        activation=some(0, 90),
        params=some(0, 900),
    )
    recipe = draw.choice([recipes.gpipe, recipes.one_f_one_b, recipes.pipeline])
    dp = draw.choice([1, 2])
    chosen = Strategy(
        Mesh(pp=stages, dp=dp),
        (*recipe(pp=stages, microbatches=draw.randint(1, 6)), *recipes.data_parallel()),
    )
    of = TuningProblem(made, training=Training(state_bytes=lambda bucket: 2 * bucket.numel + 4))
    exact = score(of, chosen, {Wanted(1): None})
    assert isinstance(exact, Scored)
    found = Sketches(of, Programs(of, None))
    sketch = found.sketch(chosen)
    assert sketch is not None
    assert least_s(found, chosen, sketch, 1) <= exact.period_s * (1 + 1e-9)
    assert states(found, sketch) <= filled(found, sketch, 1)[0] <= exact.peak_bytes


def test_bounds_hold_where_one_device_runs_several_stages() -> None:
    made = replace(program(), chunks=program().chunks)
    directives = [partition(stages=4), split(where(), microbatches=3)]
    directives += [place(where(stage=s), on=dict(pp=s % 2)) for s in range(4)]
    chosen = Strategy(Mesh(pp=2), directives)
    of = TuningProblem(made)
    exact, found = score(of, chosen, {Wanted(1): None}), Sketches(of, Programs(of, None))
    sketch = found.sketch(chosen)
    assert isinstance(exact, Scored) and sketch is not None and len(sketch.roles["pp0"]) == 4
    assert (
        filled(found, sketch, 1)[0] <= exact.peak_bytes
        and least_s(found, chosen, sketch, 1) <= exact.period_s
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name",
    [
        "interleaved",
        "looped_bfs",
        "zb_h1",
        "zb_h2",
        "interleaved_zb",
        "zbv",
        "dualpipe_v",
        "dualpipe",
    ],
)
@given(st.randoms(use_true_random=False))
@settings(max_examples=8)
def test_bounds_hold_for_every_recipe(name: str, draw: Any) -> None:
    """With given durations a pair is one instruction; without them the compiler interleaves it."""
    pp, m = draw.choice([2, 4]), draw.randint(1, 9)
    stages = pp if name in ("zb_h1", "zb_h2", "dualpipe") else 2 * pp

    def some(low: int, high: int) -> Sequence[int]:
        return [draw.randint(low, high) for _ in range(stages)]

    keep = some(0, 90)
    made = synthetic(
        stages=stages,
        F=some(1, 5),
        I=some(1, 5),
        W=some(0, 5),
        activation=keep,
        kept_after_I=[draw.randint(0, k) for k in keep],
        params=some(0, 900),
    )
    of = (
        TuningProblem(made)
        if draw.choice([True, False])
        else TuningProblem(untimed(made), cluster=cpu_local())
    )
    chosen = Strategy(Mesh(pp=pp), getattr(recipes, name)(pp=pp, microbatches=m))
    exact, found = score(of, chosen, {Wanted(1): None}), Sketches(of, Programs(of, None))
    sketch = found.sketch(chosen)
    assert isinstance(exact, Scored), exact
    assert (sketch is None) == (name == "dualpipe" and m > 1), "a stage on two devices has none"
    if sketch is not None:
        assert least_s(found, chosen, sketch, 1) <= exact.period_s * (1 + 1e-9)
        assert states(found, sketch) <= filled(found, sketch, 1)[0] <= exact.peak_bytes


def untimed(made: Program) -> Program:
    """The program with work in place of given durations."""

    def counted(step: Signature) -> Signature:
        work = int((step.cost.seconds or 0) * 1e9)
        return replace(step, cost=Cost((Kernel("matmul", (8, 8, 8), "float32", work, 0),)))

    chunks = [
        replace(c, steps={name: counted(step) for name, step in c.steps.items()})
        for c in made.chunks
    ]
    return replace(made, chunks=tuple(chunks), source="untimed")


@dataclass(frozen=True)
class Silent:
    """A directive of a user's file that does not say what it decides."""

    site: str = site_field()

    def check(self, graph: Graph) -> None: ...

    def apply(self, graph: Graph) -> Graph:
        return graph


@dataclass(frozen=True)
class Saying(Silent):
    def apply(self, graph: Graph) -> Graph:
        return graph

    def decided(self) -> directives.Decided | None:
        return directives.Decided()


class Placing(place):
    """Places otherwise than the class whose `decided` it has."""

    def apply(self, graph: Graph) -> Graph:
        return super().apply(graph)


def test_a_strategy_has_bounds_when_each_directive_says_what_it_decides() -> None:
    of = TuningProblem(program())
    own = recipes.gpipe(pp=2, microbatches=3)

    def sketch(*more: directives.Directive) -> Sketch | None:
        return Sketches(of, Programs(of, None)).sketch(Strategy(Mesh(pp=2), (*own, *more)))

    assert sketch() is not None and sketch() == sketch(Saying())
    assert sketch(Silent()) is None
    assert sketch(Placing(where(stage=0), on={"pp": 0})) is None
    assert [
        directives.decided(d) is None
        for d in (Silent(), Placing(where(), on={"pp": 0}), place(where(), on={"pp": 0}))
    ] == [
        True,
        True,
        False,
    ]


def test_a_pair_of_given_duration_has_no_bound() -> None:
    made, chosen = program(), Strategy(Mesh(pp=2), recipes.dualpipe_v(pp=2, microbatches=8))
    found = [
        Sketches(of, Programs(of, None)).sketch(chosen)
        for of in (TuningProblem(made), TuningProblem(replace(made, overlap=(1.0,) * 8)))
    ]
    assert found[0] is not None and found[1] is None


def test_what_is_in_flight_is_read_from_the_order() -> None:
    def steps(text: str) -> Any:
        return order(*(where(stage=0, phase=s[0], mb=int(s[1])) for s in text.split()))

    def most(text: str) -> int:
        return in_flight(steps(text), {"stage": 0}).most

    assert [most("F0 B0 F1 B1"), most("F0 F1 B0 F2 B1 B2"), most("F0 F1 F2 B2 B1 B0")] == [1, 2, 3]
    assert most("F0 F1 F2") == 0, "without backward in the order it may be anywhere"
    assert most("B0 F0 F1 B1") == 1
    assert in_flight(steps("F0 F1 B0 B1"), {"stage": 1}).most == 0
    assert most("F0 F1 I0 W0 F2 I1 I2 W1 W2") == 2, "until the input gradient everything is kept"
    assert most("F0 W0 F1 I0 I1") == 1, "a stage without an input gradient"
    assert most("F0 F1 W0 W1") == 0, "their input gradients may be anywhere"

    f0, f1, b0 = (where(stage=0, phase=p, mb=mb) for p, mb in (("F", 0), ("F", 1), ("B", 0)))
    b1 = where(stage=0, phase="B", mb=1)
    assert in_flight(order(f0, f1, b0, b1), {"stage": 0}).most == 2
    assert in_flight(order(f0, overlap(f1, b0), b1), {"stage": 0}).most == 1, (
        "the backward may come first"
    )


def test_all_stages_of_a_device_count_at_one_moment() -> None:
    """Interleaved stages hold 2(p - 1 - r) + (v - 1)p + 1 activations on device r (Narayanan et al. 2021)."""
    pp, chunks, m = 4, 3, 12
    made = synthetic(stages=pp * chunks, F=2, I=2, W=2, activation=10)
    found = Sketches(of := TuningProblem(made), Programs(of, None))
    sketch = found.sketch(
        Strategy(Mesh(pp=pp), recipes.interleaved(pp=pp, microbatches=m, chunks=chunks))
    )
    assert sketch is not None
    most = dict[str, int]()
    for role, groups in sketch.moments:
        most[role] = max(most.get(role, 0), sum(n for _, n in groups))
    assert most == {f"pp{r}": 2 * (pp - 1 - r) + (chunks - 1) * pp + 1 for r in range(pp)}
    assert found.filled_bytes(sketch, 1)["pp0"][0] >= 10 * most["pp0"]


def test_the_mesh_and_the_batch_are_checked_first() -> None:
    cluster = load_cluster("h100x2")
    wide = Strategy(Mesh(pp=4), recipes.gpipe(pp=4, microbatches=2))
    pruned = rules(TuningProblem(program(), cluster=cluster)).check(wide)
    assert (
        pruned is not None
        and pruned.rule == "devices"
        and "4 ranks" in pruned.reason
        and "2 devices" in pruned.reason
    )
    pruned = rules(TuningProblem(program(), global_batch=9)).check(wide)
    assert (
        pruned is not None
        and pruned.rule == "rows"
        and "9 rows do not divide into 2 microbatches x 1" in pruned.reason
    )


@directive
class Nothing:
    """A directive of a user's."""

    site = ""

    def check(self, graph: Graph) -> None: ...

    def apply(self, graph: Graph) -> Graph:
        return graph


def test_directives_of_the_users_own_are_not_pruned() -> None:
    from dataclasses import dataclass

    own = dataclass(frozen=True)(Nothing)()
    made = Strategy(Mesh(), (*recipes.gpipe(pp=1, microbatches=8), own))
    assert rules(problem(1)).check(Strategy(Mesh(), made.directives[:-1])) is not None
    assert rules(problem(1)).check(made) is None


def test_strategies_that_do_not_apply_are_left_to_the_compiler() -> None:
    assert (
        rules(problem(1)).check(Strategy(Mesh(pp=2), recipes.gpipe(pp=9, microbatches=1))) is None
    )


def test_bounds_hold_for_the_random_cases_of_the_compiler() -> None:
    """Placements by microbatch, V and loop shapes, orders drawn from random runs, programs that are no chain."""
    sketched = tight = 0
    for seed in range(20):
        case = random_case(seed)
        costs = (
            Costs(host=HostCosts(0.3, 0.1), allocator=AllocatorCosts(1000, 1.5))
            if seed % 2
            else None
        )
        of = TuningProblem(case.program, case.global_batch, case.training, cpu_local(), costs)
        found = Sketches(of, Programs(of, None))
        sketch = found.sketch(case.strategy)
        if sketch is None:
            continue
        rows = found.rows(sketch)
        assert rows is not None
        exact = score(of, case.strategy, {Wanted(rows): None})
        assert isinstance(exact, Scored), exact
        sketched += 1
        least, role = filled(found, sketch, rows)
        assert states(found, sketch) <= least <= exact.peak_bytes, case.text
        assert least_s(found, case.strategy, sketch, rows) <= exact.period_s * (1 + 1e-9), case.text
        assert found.on_device(sketch, least, role) <= exact.device_bytes, case.text
        assert costs is None or exact.device_bytes == 1000 + round(1.5 * exact.peak_bytes)
        tight += least > 0.7 * exact.peak_bytes
    assert sketched > 10 and tight > 2, "the bounds would be worth nothing"


def test_a_limit_that_nothing_fits_names_the_smallest_that_does() -> None:
    least = min(s.device_bytes for _, s in exhaustive(problem()))
    with pytest.raises(NothingFoundError) as caught:
        tune(problem(300), strategy, trials=12, workers=0)
    text = str(caught.value)
    assert (
        f"the smallest needs {enough_text(least)} (rank " in text
        and "Set memory_limit to at least that" in text
    )
    assert text.startswith("nothing fits: none of the ") and caught.value.study.exhausted, (
        "the whole space was tried"
    )
    assert caught.value.study.best is None and all(r.reason for r in caught.value.study.rows)
    assert tune(problem(least), strategy, trials=12, workers=0).best is not None
    with pytest.raises(NothingFoundError):
        tune(problem(least - 1), strategy, trials=12, workers=0)


def test_no_limit_is_advised_that_the_smaller_type_of_device_does_not_have() -> None:
    least = min(s.device_bytes for _, s in exhaustive(problem()))
    nothing = {"context_bytes": 0, "group_bytes": 0, "p2p_bytes": 0, "allocator_factor": 1.0}
    large = load_cluster("h100x1*4").each_device(lambda device: replace(device, **nothing))
    for held, advised in ((least // 2, False), (1 << 30, True)):
        small = large.each_device(
            lambda device, held=held: replace(device, name="small", memory_bytes=held)
        )
        of = replace(
            problem(300 if advised else large.device.memory_bytes),
            cluster=Cluster.joined((small, large)),
        )
        with pytest.raises(NothingFoundError) as caught:
            tune(of, strategy, trials=12, workers=0)
        text = str(caught.value)
        assert ("Set memory_limit to at least" in text) is advised
        assert (
            f"whatever the limit: small {held} B, h100-80g-sxm 79.65 GiB. Put" in text
        ) is not advised
        assert "or offer choices that hold less" in text


def test_a_plan_that_does_not_fit_says_which_rank_by_how_much_and_where() -> None:
    made = strategy(FixedTrial({"pp": 2, "schedule": "gpipe", "microbatches": 4}))
    exact = score(problem(), made, {Wanted(1): None})
    assert isinstance(exact, Scored) and not exact.reason
    found = score(problem(exact.device_bytes - 10), made, {Wanted(1): None})
    assert isinstance(found, Scored)
    for part in (
        "rank 0 (pp0) needs",
        "10 B more than the limit",
        "fullest in instruction",
        "param 1 KiB",
    ):
        assert part in found.reason
    assert score(problem(exact.device_bytes), made, {Wanted(1): None}) == exact


def test_every_rule_has_its_text() -> None:
    assert list(RULES) == [
        "skipped",
        "devices",
        "rows",
        "states",
        "buckets",
        "activations",
        "slower",
    ]
