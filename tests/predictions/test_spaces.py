"""The space that Piper makes for a job: it has every axis that divides, begins with what people publish, and leaves out
by name what does not go together."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from typer.testing import CliRunner

import piper
from benchmarks.planned.tables import draws
from piper import cli, models
from piper.api.problems import spaces
from piper.api.problems.first_candidates import FirstCandidates
from piper.api.problems.scale import FULL, Scale
from piper.api.problems.spaces import StrategySpace
from piper.api.problems.tuning_problem import Conditions, problem_of
from piper_autotune import NothingFoundError
from piper_autotune.scoring.evaluators import Here
from piper_autotune.scoring.scoring import Refused
from piper_autotune.space.problem import Programs
from piper_autotune.space.rules import PruningRules
from piper_autotune.space.sketch import Sketches, wanted_for_graph
from piper_autotune.space.space import SkippedError
from piper_ir.ground.errors import TuneError
from piper_ir.ground.sizes import bind
from piper_simulator import load_cluster
from tests.helpers.cases import each_case

SIZES = models.LlamaConfig(
    layers=4, width=64, heads=8, kv_heads=2, hidden=96, vocab=128, length=4096
)
MIXTURE = models.MoEConfig(
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    hidden=32,
    vocab=64,
    length=64,
    experts=4,
    top_k=2,
)
WHOLE = {"capacity_factor": None, "number": 16}
LONG = models.LlamaConfig(
    layers=16, width=2048, heads=16, kv_heads=4, hidden=8192, vocab=128_256, length=262_144
)
CLUSTER = "h100x8*2"
USUAL = {
    "cp": 1,
    "ep": 1,
    "rows": 1,
    "sequence": True,
    "schedule": "1f1b",
    "zero": 1,
    "bucket_mb": 25.0,
}


def llama() -> piper.Job:
    return models.job(SIZES, global_batch=16)


def mixture() -> piper.Job:
    return models.job(MIXTURE, global_batch=16)


def dropless() -> piper.Job:
    return models.job(replace(MIXTURE, experts=replace(MIXTURE.experts, **WHOLE)), global_batch=16)


def long_rows() -> piper.Job:
    return models.job(LONG, global_batch=16)


def with_gib(space: StrategySpace, gib: int) -> StrategySpace:
    """The space of a cluster whose devices have so much memory."""
    return replace(space, scale=replace(space.scale, memory_bytes=gib * 2**30))


def one_device(job: piper.Job, **fixed: Any) -> Any:
    space = piper.space(job, "h100x1", **fixed)
    return piper.tune(job, space, cluster="h100x1", trials=8, workers=0)


class Chosen(optuna.trial.FixedTrial):
    """Skips as the search's trials do."""

    def skip(self, reason: str) -> None:
        raise SkippedError(reason)


def chosen(space: StrategySpace, **choices: Any) -> piper.Strategy:
    sizes = {axis: 1 for axis in ("tp", "cp", "pp") if axis not in choices}
    usual = {"rows": 1, "keep": "all", "zero": 0, "bucket_mb": 25.0, "attention": "ring"}
    usual |= {"hybrid": False}
    return space(Chosen({**usual, **sizes, **choices}))


def test_axes_have_the_sizes_that_divide() -> None:
    space = piper.space(llama(), CLUSTER)
    assert dict(space.sizes) == {"tp": (1, 2, 4, 8), "cp": (1, 2), "ep": (1,), "pp": (1, 2, 4)}
    assert (space.devices, space.layers, space.rows) == (16, 4, (1, 2, 4, 8))
    assert piper.space(mixture(), CLUSTER).sizes["ep"] == (1, 2, 4)


def test_experts_leave_a_node_where_their_states_need_it() -> None:
    scale = replace(piper.space(mixture(), CLUSTER).scale, per_node=8)
    assert spaces._expert_sizes(64, 256, 16, scale) == (1, 2, 4, 8)
    large = replace(scale, parameters=671 * 10**9)
    assert spaces._expert_sizes(64, 256, 16, large) == (1, 2, 4, 8, 16, 32, 64)


def test_a_search_begins_with_what_is_published_and_with_each_mesh_in_little_memory() -> None:
    space = piper.space(llama(), CLUSTER)
    sizes = {"tp": 1, "cp": 1, "ep": 1, "pp": 1, "rows": 1}
    states = {"zero": 3, "resident_mb": 0, "prefetch": 1, "bucket_mb": 100.0}
    usual = {"schedule": "1f1b", "sequence": True, "attention": "ring", "fold": False, "cut": False}
    usual |= {"graded": False, "away": 0.0, "host": False, "hybrid": False}
    fsdp, tensor = ({**sizes, **states, **usual, "keep": "attention", "tp": tp} for tp in (1, 8))
    assert space.starts.index(fsdp) < space.starts.index(tensor), "messages of layers take time"
    stages = {(s["pp"], s.get("chunks")) for s in replace(space, layers=16).starts}
    assert stages == {(pp, None) for pp in (1, 2, 4)} | {(2, 8), (4, 4)}
    cells = {(s["tp"], s["cp"], s["pp"]) for s in space.starts if s["keep"] == "inputs"}
    meshes = {(tp, cp, pp) for tp in (1, 2, 4, 8) for cp in (1, 2) for pp in (1, 2, 4)}
    assert cells == {at for at in meshes if at[0] * at[1] * at[2] <= 16}
    exchanged = [s for s in space.starts if s["attention"] == "heads"]
    assert sorted((s["tp"], s["cp"]) for s in exchanged) == [(tp, 2) for tp in (1, 2, 4, 8)]
    large = replace(space, scale=replace(space.scale, parameters=10**12))
    for made, zero in ((space, 1), (large, 3)):
        assert {s["zero"] for s in made.starts if s["pp"] > 1 and s["keep"] == "inputs"} == {zero}


def test_a_search_begins_with_meshes_that_keep_as_much_as_has_room() -> None:
    """A large memory keeps all tensors of a layer, a small one its inputs, and one in between has a policy in between.

    What keeps less is tried, too, since an estimate is no bound.
    """
    space = piper.space(llama(), CLUSTER)

    def kept(memory_bytes: float) -> list[set[str]]:
        """The policies of the first candidates beside the published ones, for each size of tp."""
        made = replace(space, scale=replace(space.scale, memory_bytes=memory_bytes))
        published = [p for least in made.starts for p in FirstCandidates(made).published([least])]
        return [
            {s["keep"] for s in made.starts if s["tp"] == tp and s not in published}
            for tp in space.sizes["tp"]
        ]

    whole = {"tp": 2, "cp": 1, "pp": 1, "zero": 1, "keep": "all"}
    assert any(whole.items() <= start.items() for start in space.starts)
    assert all(policies == {"all", "products", "attention", "inputs"} for policies in kept(1e12))
    assert all(policies == {"inputs"} for policies in kept(1e3))
    assert any("products" in policies or "attention" in policies for policies in kept(2e6))


def test_a_slow_layout_is_rejected_by_a_trace_at_its_own_rows() -> None:
    """A plan of one row needs no other trace than that one."""
    cluster = load_cluster(CLUSTER)
    problem, more = problem_of(llama(), Conditions(cluster))
    programs = Programs(problem, more["at_rows"], more["under"])
    sketches, rules = Sketches(problem, programs), PruningRules(problem, programs)
    space = piper.space(llama(), cluster)
    for rows, keep in ((1, "inputs"), (2, "all")):
        strategy = chosen(space, tp=2, pp=2, sequence=True, schedule="1f1b", rows=rows, keep=keep)
        wanted, known_s = wanted_for_graph(problem, strategy), 0.0
        for slower in (True, False):
            pruned = rules.check(strategy, known_s)
            assert (pruned is not None and pruned.rule == "slower") == slower
            traced = wanted in programs.found
            assert traced != (slower and rows > 1), "all rows are traced if it may be of use"
            early = sketches.sketch(strategy, rows)
            assert early is not None and early.wanted.alone == (rows > 1)
            assert wanted.request.shardings
            known_s = sketches.computing_s(strategy, early, rows)[0] * (1 + 1e-9)
        sketch = sketches.sketch(strategy)
        assert sketch is not None and not sketch.wanted.alone
        assert sketches.computing_s(strategy, sketch, rows)[0] == pytest.approx(known_s, rel=1e-8)


@pytest.mark.parametrize("make", [llama, pytest.param(mixture, marks=pytest.mark.long)])
def test_any_choice_is_a_strategy_of_all_devices_or_is_left_out_with_its_reason(make: Any) -> None:
    space = piper.space(make(), CLUSTER)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    worlds, skipped = [], []
    for _ in range(300):
        trial = study.ask()
        trial.skip = Chosen({}).skip  # type: ignore[attr-defined]  # as the search adds it
        try:
            worlds.append(space(trial).mesh.world)
        except SkippedError as skip:
            skipped.append(str(skip))
    assert set(worlds) == {16} and len(worlds) > 50
    reasons = ("divide", "do not fill", "need whole rows")
    assert all(any(reason in text for reason in reasons) for text in skipped) and skipped


@pytest.mark.parametrize("make", [llama, long_rows, dropless])
def test_every_call_is_written_as_it_is_meant(make: Any) -> None:
    space = with_gib(piper.space(make(), CLUSTER), 39)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    names, seen = {"piper": piper, "recipes": piper.recipes, "where": piper.where}, set()
    for _ in range(100):
        trial = study.ask()
        trial.skip = Chosen({}).skip  # type: ignore[attr-defined]  # ours has it
        with suppress(SkippedError):
            for call in space.chosen(trial)[1]:
                made = eval(f"({call.text()},)", {**names, "ANY": piper.ANY})
                assert made == tuple(call.directives)
                seen.add((call.name, "over" in call.how))
    if make is long_rows:
        assert {"tile_loss", "offload"} <= {name for name, _ in seen}
    if make is dropless:
        assert ("expert_parallel", True) in seen


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("sizes", "fixed", "used"),
    [
        ({"layers": 4, "length": 131_072}, {"tiles": 1, "away": 0.0}, "tiles"),
        ({"layers": 24, "length": 262_144}, {"away": 0.0}, "away"),
        ({"layers": 10, "length": 2048, "hidden": 90_112}, {"host": False}, "host"),
    ],
)
def test_a_job_that_fits_no_other_way(
    sizes: dict[str, int], fixed: dict[str, Any], used: str
) -> None:
    job = models.job(replace(LONG, **sizes), global_batch=1)
    with pytest.raises(NothingFoundError, match="of this space fits into"):
        one_device(job, **fixed)
    study = one_device(job)
    assert study.best_row is not None and study.best_row.params[used] > (used == "tiles")
    assert study.best is not None and study.rows[0].state == "complete", "it is tried first"
    strategy = piper.Strategy(study.best.mesh, study.best.directives)
    assert piper.simulate(piper.compile(job, strategy).plan, "h100x1").fits


def test_tensors_that_wait_on_the_host_are_in_no_bound() -> None:
    cluster = load_cluster("h100x1")
    job = models.job(replace(LONG, layers=24, length=262_144), global_batch=1)
    space = piper.space(job, cluster)
    for gib, rules_of in ((79, ("activations", None)), (16, ("states", "states"))):
        problem, more = problem_of(job, Conditions(cluster, memory_limit=gib * 2**30))
        rules = PruningRules(problem, Programs(problem, more["at_rows"], more["under"]))
        for away, rule in zip((0.0, 1.0), rules_of):
            pruned = rules.check(chosen(space, tiles=8, away=away, keep="products"))
            assert (pruned and pruned.rule) == rule


def test_later_stages_keep_more_where_the_first_are_full() -> None:
    space = with_gib(piper.space(long_rows(), CLUSTER), 39)
    calls = space.chosen(
        Chosen(
            {**USUAL, "pp": 4, "tp": 4, "graded": True, "keep": "inputs", "tiles": 1, "away": 0.0}
        )
    )[1]
    (call,) = (call for call in calls if call.name == "recomputation")
    assert eval(f"({call.text()},)", {"recipes": piper.recipes}) == call.directives
    assert call.how["keep"] == ("inputs", "inputs", "attention", "attention")


@pytest.mark.long
@pytest.mark.parametrize("make", [llama, long_rows, mixture, dropless])
def test_random_choices_compile_or_a_rule_rejects_them(make: Any) -> None:
    job, cluster = make(), load_cluster(CLUSTER)
    problem, more = problem_of(job, Conditions(cluster, memory_limit=cluster.device.memory_bytes))
    programs = Programs(problem, more["at_rows"], more["under"])
    rules, here = PruningRules(problem, programs), Here(problem, programs)
    kinds = Counter[str]()
    for _, strategy in draws(piper.space(job, cluster), 40):
        pruned = rules.check(strategy)
        outcome = here.result(here.submit(strategy)) if pruned is None else pruned
        assert not isinstance(outcome, Refused), outcome
        kinds[type(outcome).__name__] += 1
    assert kinds["Scored"] > 10


@pytest.mark.long
@each_case(
    "choices",
    [
        {"tp": 2, "cp": 2, "pp": 2, "sequence": True, "schedule": "zb_h1", "zero": 2},
        {"cp": 2, "zero": 3, "prefetch": 1, "resident_mb": "step", "keep": "inputs", "rows": 2},
        {"pp": 2, "schedule": "interleaved", "chunks": 2, "zero": 1},
        {"tp": 8, "sequence": False, "zero": 1},
        {"cp": 2, "tp": 8, "sequence": True, "zero": 0},
        {"cp": 2, "zero": 3, "hybrid": True, "prefetch": 1, "resident_mb": 0},
    ],
)
def test_its_strategies_compile(choices: dict[str, Any]) -> None:
    plan = piper.compile(llama(), chosen(piper.space(llama(), CLUSTER), **choices)).plan
    over = {"dp", "cp"} if choices.get("cp", 1) > 1 else {"dp"}
    shared = set(plan.buckets[0].shard.optim)
    assert plan.mesh.world == 16 and shared == (over if choices["zero"] else set())
    assert plan.mesh.size("rep") == (2 if choices.get("hybrid") else 1)


@pytest.mark.long
def test_a_mixtures_experts_are_shared() -> None:
    plan = piper.compile(mixture(), chosen(piper.space(mixture(), CLUSTER), ep=4, zero=1)).plan
    assert plan.mesh.size("ep") == 4 and plan.replicas == 16


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("make", "choices"),
    [
        (dropless, {"tp": 2}),
        (dropless, {"tp": 2, "ep": 2, "fold": False, "cut": False}),
        (dropless, {"tp": 2, "ep": 2, "fold": False, "cut": True}),
        (dropless, {"tp": 2, "ep": 2, "fold": True}),
        (mixture, {"tp": 2, "ep": 2}),
    ],
)
def test_estimates_know_which_axes_cut_experts(make: Any, choices: dict[str, Any]) -> None:
    space = piper.space(make(), "h100x4")
    usual = {"sequence": True, "zero": 1, "ep": 1}
    plan = piper.compile(make(), chosen(space, **{**usual, **choices})).plan
    whole, own = (
        sum(bind(p.spec.numel, plan.rows) for p in params if len(p.spec.shape) == 3)
        for params in (plan.whole_params, plan.params)
    )
    at = {"cp": 1, "pp": 1, **usual, **choices}
    assert space.scale.own(at) * whole == space.scale.parameters * own


def test_a_token_is_computed_by_the_experts_that_its_router_chooses() -> None:
    dense = piper.space(llama(), CLUSTER).scale
    assert dense.active == dense.parameters
    for job, experts in ((mixture(), 4), (dropless(), 16)):
        scale = piper.space(job, CLUSTER).scale
        stacked = sum(p.numel() for p in job.model().parameters() if p.dim() == 3)
        idle = stacked * (1 - MIXTURE.experts.top_k / experts)
        assert scale.active == pytest.approx(scale.parameters - idle)


def test_estimates_know_what_leaves_a_node() -> None:
    """Devices of a node share links for states that lie on neighbours; each sends its own tokens to experts."""
    scale = replace(piper.space(dropless(), CLUSTER).scale, active=0.0, inside=9.0, between=1.0)

    def seconds(scale: Scale, microbatches: int = 2, **at: Any) -> float:
        usual = {"tp": 1, "cp": 1, "pp": 1, "rows": 1, "keep": "all", "zero": 3}
        return scale.step_s({**usual, **at}, layers=1, microbatches=microbatches, replicas=32)

    states = replace(scale, width=0, parameters=64)
    moved = {ep: 16 * states.own({"tp": 1, "pp": 1, "ep": ep}) for ep in (1, 2, 16)}
    assert seconds(states, ep=1) == pytest.approx(moved[1] / 8)
    assert seconds(states, ep=2) == pytest.approx(moved[2] / 4)
    assert seconds(states, ep=16) == pytest.approx(moved[16] / 1)
    tokens = replace(scale, parameters=0, width=1, tokens=1, chosen=3)
    each = 8 * 2
    assert seconds(tokens, ep=1) == 0.0
    wide = {"tp": 8, "cp": 2, "ep": 1}
    assert seconds(tokens, **wide) == seconds(replace(tokens, chosen=1), **wide) > 0
    assert seconds(tokens, cp=2, ep=8) > seconds(tokens, cp=2, ep=4), "four of eight share a node"
    assert seconds(tokens, ep=4) == pytest.approx(each * 3 * (3 / 4) / 9)
    assert seconds(tokens, ep=16) == pytest.approx(each * (3 * (1 / 2 - 1 / 16) / 9 + 1))
    assert seconds(tokens, ep=32) == pytest.approx(
        each * (3 * (1 / 4 - 1 / 32) / 9 + min(3 * 3 / 4, 3))
    )


def test_experts_are_folded_where_whole_ones_would_fill_a_device() -> None:
    space = piper.space(dropless(), CLUSTER)
    at = {"tp": 4, "cp": 1, "ep": 2, "pp": 1}
    large = replace(space.scale, parameters=10**9)
    full, folded = (large.states({**at, "fold": fold}, space.sharing(at)) for fold in (False, True))
    between = replace(space, scale=replace(large, memory_bytes=int((full + folded) / FULL / 2)))
    (start,) = (s for s in between.starts if at.items() <= s.items() and s["keep"] == "inputs")
    assert (start["fold"], start["host"], start["away"]) == (True, False, 0.0)
    choices = {**at, "sequence": True, "fold": True, "zero": 3, "prefetch": 1, "resident_mb": 0}
    assert chosen(between, **choices).directives, "no choice of a host is asked for"
    with pytest.raises(ValueError, match=r"parameter '(host|tiles|away)' is not found"):
        chosen(between, **{**choices, "fold": False, "cut": False})


def test_groups_that_share_states_are_the_replicas_of_a_node() -> None:
    """Two nodes of 8: with tp=2 a node has 4 replicas; with all 16 devices in one replica, or 8, there is no choice."""
    space = piper.space(llama(), CLUSTER, hybrid=True)
    of = {tp: chosen(space, tp=tp, sequence=True, zero=1) for tp in (1, 2, 8)}
    assert [(m.mesh.size("dp"), m.mesh.size("rep")) for m in of.values()] == [
        (8, 2),
        (4, 2),
        (2, 1),
    ]
    (shared,) = (d for d in of[2].directives if isinstance(d, piper.replicate))
    assert shared.over == ("dp", "rep") and set(shared.shards.optim) == {"dp"}
    assert chosen(space, zero=0).mesh.size("rep") == 1


def test_a_choice_may_be_fixed_and_others_are_named() -> None:
    space = piper.space(llama(), CLUSTER, tp=2, keep="inputs", zero=1)
    assert space.sizes["tp"] == (2,) and {s["tp"] for s in space.starts} == {2}
    strategy = space(
        Chosen({"cp": 1, "pp": 1, "rows": 1, "sequence": True, "bucket_mb": 25.0, "hybrid": False})
    )
    assert strategy.mesh.size("tp") == 2 and strategy.directives[0].pieces == 1
    cut = piper.space(llama(), CLUSTER, tp=2, keep="inputs", zero=1, pieces=4)
    given = {"cp": 1, "pp": 1, "rows": 1, "sequence": True, "bucket_mb": 25.0, "hybrid": False}
    assert cut(Chosen(given)).directives[0].pieces == 4
    at: dict[str, Any] = {"pp": 2, "schedule": "1f1b"}
    orders = {name: piper.space(llama(), CLUSTER, order=name) for name in ("usual", "pp_first")}
    axes = [chosen(space, **at).mesh.axes for space in orders.values()]
    assert axes == [("dp", "pp"), ("pp", "dp")], "that of neighbouring ranks first"
    with pytest.raises(TuneError, match=r"order='fast'\): accepted are usual, pp_first"):
        piper.space(llama(), CLUSTER, order="fast")
    with pytest.raises(TuneError, match=r"space\(depth=...\): accepted are tp, cp"):
        piper.space(llama(), CLUSTER, depth=2)


def test_tune_without_a_strategy_searches_it() -> None:
    study = piper.tune(mixture(), cluster="h100x8", trials=4, workers=0)
    space = piper.space(mixture(), "h100x8")
    assert study.best is not None and study.best.mesh.world == 8
    first = space.starts[0]
    another = next(s for s in space.starts if space.kind(s) != space.kind(first))
    for row, start in zip(study.rows, (first, another)):  # half of the trials
        assert all(row.params[name] == start[name] for name in start.keys() & row.params.keys())
    with pytest.raises(TuneError, match=r"without a strategy.*a piper.Job and a cluster"):
        piper.tune(mixture(), cluster=None)


def test_what_is_skipped_is_no_trial_and_keeps_its_reason() -> None:
    def strategy(trial: Any) -> piper.Strategy:
        pp = trial.suggest_int("pp", 1, 3)
        if pp == 3:
            trial.skip("3 stages are odd")
        return piper.Strategy(piper.Mesh(pp=pp), piper.recipes.one_f_one_b(pp=pp, microbatches=2))

    study = piper.tune(mixture(), strategy, cluster="h100x8", trials=9, workers=0)
    (row,) = [row for row in study.rows if row.kind == "skipped"]
    assert row.reason == "3 stages are odd" and row.params == {"pp": 3}
    assert [line for line in study.rules if line.startswith("skipped")] == [
        "skipped: strategy(trial) left it out by trial.skip (1 candidates)"
    ]


SKIPS = """
import piper
from tests.predictions.test_spaces import mixture
job = mixture()
def strategy(trial):
    pp = trial.suggest_int("pp", 1, 3)
    if pp == 3:
        trial.skip("3 stages are odd")
    return piper.Strategy(piper.Mesh(pp=pp), piper.recipes.one_f_one_b(pp=pp, microbatches=2))
"""


def test_a_file_without_a_strategy_is_searched_and_what_it_skips_is_one_message(
    tmp_path: Path,
) -> None:
    path = tmp_path / "job.py"
    path.write_text(SKIPS)
    done = CliRunner().invoke(cli.app, ["simulate", str(path), "-p", "pp=3"])
    assert done.exit_code == 2
    assert "the strategy skips pp=3: 3 stages are odd" in done.stderr
    path.write_text(SKIPS.partition("def strategy")[0])
    asked = ["tune", str(path), "--cluster", "h100x8", "--trials", "2", "--workers", "0", "--json"]
    done = CliRunner().invoke(cli.app, asked)
    assert done.exit_code == 0, done.stderr
    best = json.loads(done.stdout)
    assert best["state"] == "complete" and {"tp", "ep", "pp", "rows"} <= best["params"].keys()
