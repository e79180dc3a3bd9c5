"""Several values of any parameter of a space: they reach the plan, are tried, and are refused where a job has none such."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

import piper
from piper import models
from piper.api.problems.job_space import KnownChoices
from piper.api.problems.recipe_calls import RecipeCall
from piper.api.problems.spaces import StrategySpace
from piper.api.problems.tried_values import PARAMETERS
from piper.planning.written import PLANNED
from piper_autotune.space.space import SkippedError, space_key
from piper_ir.ground.errors import TuneError
from tests.helpers.cases import each_case
from tests.helpers.command_line import command
from tests.helpers.slow_devices import slow_devices
from tests.predictions.test_spaces import CLUSTER, MIXTURE, Chosen, dropless, llama

USUAL_ALONE = {
    "order", "pieces", "at", "group", "etp", "beside", "away_tensors", "away_prefetch", "whole_mb"
}  # fmt: skip
"""The parameters that have one value unless a user gives more."""
SCOPE = {"piper": piper, "recipes": piper.recipes, "where": piper.where, "ANY": piper.ANY}
SHARED = models.Experts(
    number=4, top_k=2, hidden=32, capacity_factor=None, shared_hidden=32, shared_within=True
)


def shared_part() -> piper.Job:
    return models.job(replace(MIXTURE, experts=SHARED), global_batch=16)


def as_written(calls: list[RecipeCall]) -> tuple[Any, ...]:
    """The directives of a strategy, read from its text."""
    return tuple(made for call in calls for made in eval(f"({call.text()},)", SCOPE))


def drawn(space: StrategySpace, number: int) -> list[tuple[dict[str, Any], piper.Strategy]]:
    """Random strategies of a space, each with its choices and equal to its text."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    made = []
    for _ in range(number):
        trial = study.ask()
        trial.skip = Chosen({}).skip  # type: ignore[attr-defined]  # as the search adds it
        with suppress(SkippedError):
            strategy = space(trial)
            assert as_written(space.chosen(trial)[1]) == strategy.directives
            made.append((dict(trial.params), strategy))
    return made


@pytest.mark.parametrize(
    ("make", "given", "words"),
    [
        (
            llama,
            {
                "pp": 2, "schedule": "1f1b", "at": "last-2", "keep": "products/2", "group": 2, "away": 1.0,
                "away_tensors": "inputs", "away_prefetch": 3, "zero": 0, "order": "pp_first", "graded": False,
            },
            ["at=(3,)", "keep='products/2', group=2)", "prefetch=3, tensors='inputs'"],
        ),
        (
            llama,
            {
                "tp": 2, "sequence": True, "pieces": 2, "keep": "inputs@*.feed_forward", "zero": 3, "whole_mb": 0.01,
                "host": "states", "tiles": 2, "resident_mb": 0, "prefetch": 2, "hybrid": False,
            },
            ["pieces=2", "keep='inputs@*.feed_forward')", "whole_mb=0.01", "tensors='states'", "tiles=2"],
        ),
        pytest.param(
            shared_part,
            {"ep": 2, "etp": 2, "tp": 2, "sequence": True, "fold": False, "cut": True, "beside": True, "zero": 1},
            ["hidden=('tp', 'etp'), beside=True", "over=('dp', 'ep', 'etp'), zero=1"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            dropless,
            {"ep": 2, "cp": 2, "cut": "cp", "fold": False, "attention": "heads", "zero": 1},
            ["hidden='cp'"],
            marks=pytest.mark.long,
        ),
    ],
    ids=["stages", "states", "experts", "experts cut over cp"],
)  # fmt: skip
def test_each_value_reaches_the_plan(make: Any, given: dict[str, Any], words: list[str]) -> None:
    usual = {axis: 1 for axis in ("tp", "cp", "pp")} | {"rows": 1, "keep": "all", "hybrid": False}
    space = piper.space(make(), CLUSTER, **{**usual, "bucket_mb": 100.0, **given})
    trial = KnownChoices({})
    strategy, (_, calls) = space(trial), space.chosen(trial)
    text = ", ".join(call.text() for call in calls)
    assert not trial.params and all(word in text for word in words), text
    assert as_written(calls) == strategy.directives
    plan = piper.compile(make(), strategy).plan
    assert plan.mesh.world == 16 and plan.mesh.size("etp") == given.get("etp", 1)
    assert (plan.mesh.axes[0] == "pp") == ("order" in given)


WIDE: dict[str, tuple[Any, ...]] = {
    "order": ("usual", "pp_first"), "at": ("even", "cost", "ends-1", "1+3"), "group": (1, 2), "whole_mb": (0, 0.5),
    "keep": ("all", "inputs", "products/3", "inputs@*.norm1"), "away": (0.0, 0.5), "away_tensors": ("all", "saved"),
    "away_prefetch": (1, 0), "host": (False, "optim", "states"), "pieces": (1, 2), "zero": (0, 3), "tp": (1, 2), "cp": (1, 2),
    "schedule": ("1f1b", "gpipe", "looped_bfs"), "bucket_mb": (50.0, 100.0), "prefetch": (0, 1), "chunks": 2, "rows": (1, 2),
}  # fmt: skip
OF_EXPERTS = {"etp": (1, 2), "beside": (False, True), "cut": (False, "tp", "cp", "tp+cp"), "ep": (1, 2)}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("make", "wide"), [(llama, WIDE), (shared_part, OF_EXPERTS | {"pp": 1, "cp": (1, 2)})]
)
def test_a_sequence_is_tried_and_nothing_else(make: Any, wide: dict[str, Any]) -> None:
    space, usual = piper.space(make(), CLUSTER, **wide), piper.space(make(), CLUSTER)
    several = {name: {*values} for name, values in wide.items() if isinstance(values, tuple)}
    seen: dict[str, set[Any]] = {name: set() for name in several}
    for params, _ in drawn(space, 500):
        for name in several.keys() & params.keys():
            seen[name].add(params[name])
    assert seen == several
    for start in space.starts:
        assert all(start[name] in values for name, values in several.items() if name in start)
    further = [start for start in space.starts if start.get("beside") or start.get("group", 1) > 1]
    assert further and space.starts.index(further[0]) < len(WIDE), "early, in one that can have it"
    asked = {name for params, _ in drawn(usual, 100) for name in params}
    assert asked and not asked & USUAL_ALONE, "searches without values are as they were"


def test_a_storage_tells_spaces_apart() -> None:
    """A study of other values has other choices under the same names, which Optuna refuses."""
    given: list[dict[str, Any]] = [{}, {"at": ("even", "cost")}, {"at": "cost"}, {"tp": 2}, {}]
    keys = [space_key(piper.space(llama(), CLUSTER, **values)) for values in given]
    assert len({*keys}) == 4 and keys[0] == keys[-1]


@each_case(
    ("at", "layers", "stages", "first_layers"),
    [
        ("last-1", 8, 4, (3, 5, 7)),
        ("first-2", 10, 3, (2, 6)),
        ("ends-1", 8, 4, (2, 5, 7)),
        ("3+0+4+1", 8, 4, (3, 3, 7)),
        ("last-2", 8, 4, "leave none for an end of 4 stages"),
        ("2+2", 4, 4, "is for 2 stages, and there are 4"),
    ],
)
def test_uneven_stages(at: str, layers: int, stages: int, first_layers: Any) -> None:
    from piper.api.problems.uneven_stages import cut_stages

    if isinstance(first_layers, tuple):
        assert cut_stages(at, layers, stages) == first_layers
        return
    with pytest.raises(TuneError, match=first_layers):
        cut_stages(at, layers, stages)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"etp": 2}, r"etp=2\): accepted are 1 alone, since the model has no dropless experts"),
        ({"beside": (False, True)}, r"beside=True\): accepted are False alone"),
        ({"at": "2+3"}, r"at='2\+3'\): accepted are sums of 4 layers, and this is one of 5"),
        ({"at": (3, 1)}, r"at=3\): accepted are even, cost, first-N"),
        (
            {"keep": ("all", "inputs@*.mlp")},
            r"keep='inputs@\*.mlp'\): .*no module matches '\*.mlp'",
        ),
        ({"keep": "product/2"}, r"keep='product/2'\): .*one of n products is kept as in"),
        ({"group": ()}, r"group=\(\)\): at least one value"),
        ({"group": True}, r"group=True\): accepted are integers from 1 on"),
        ({"whole_mb": -1}, r"whole_mb=-1\): accepted are numbers from 0 on"),
        ({"away_tensors": "optim"}, r"'optim'\): accepted are all, saved, inputs"),
        ({"tp": 3}, r"tp=3\): accepted are the divisors of 16 devices"),
        ({"order": ("usual", "fast")}, r"order='fast'\): accepted are usual, pp_first"),
    ],
)
def test_values_that_no_plan_can_have(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TuneError, match=words):
        piper.space(llama(), CLUSTER, **given)


@pytest.mark.long
def test_parts_of_experts_that_a_model_lacks() -> None:
    with pytest.raises(TuneError, match=r"beside=True\): .*computes nothing beside its experts"):
        piper.space(dropless(), CLUSTER, beside=True)
    odd = models.job(replace(MIXTURE, experts=replace(SHARED, hidden=24)), global_batch=16)
    with pytest.raises(TuneError, match=r"etp=16\): .*cannot share 24 evenly"):
        piper.space(odd, CLUSTER, etp=16)


HEAD = models.LlamaConfig(
    layers=16, width=512, heads=8, kv_heads=8, hidden=2048, vocab=64_000, length=1024
)
EXPERTS = models.Experts(
    number=16, top_k=2, hidden=512, capacity_factor=None, shared_hidden=4096, shared_within=True
)
ALONE = {
    "tp": 1, "cp": 1, "rows": 1, "keep": "all", "zero": 1, "hybrid": False, "bucket_mb": 100.0, "graded": False,
    "away": 0.0, "tiles": 1, "host": False,
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "fixed", "name", "values"),
    [
        (HEAD, {"pp": 8, "schedule": "1f1b"}, "at", ("even", "last-1", "ends-1")),
        (replace(MIXTURE, width=512, length=1024, experts=EXPERTS), {"pp": 1, "ep": 16}, "beside", (False, True)),
    ],
    ids=["a large head", "a shared expert"],
)  # fmt: skip
def test_a_search_finds_a_better_strategy(
    model: Any, fixed: dict[str, Any], name: str, values: tuple[Any, ...]
) -> None:
    job, cluster = models.job(model, global_batch=32), slow_devices(CLUSTER, slower=1)
    periods = []
    for tried in ({}, {name: values}):
        space = piper.space(job, cluster, **ALONE, **fixed, **tried)
        best = piper.tune(job, space, cluster=cluster, trials=4, workers=0).best_row
        assert best is not None and best.period_s is not None
        periods.append(best.period_s)
    assert best.params[name] in values[1:] and periods[1] < 0.97 * periods[0], periods


JOB = """
import piper
job = piper.models.job(piper.models.LlamaConfig(
    layers=4, width=32, heads=4, kv_heads=2, hidden=48, vocab=64, length=64), global_batch=8)
"""


def test_the_command_line_gives_values_and_refuses_others(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(JOB)
    usual = [file, "--cluster", "h100x4", "--trials", "3", "--out", tmp_path / "runs"]
    given = ["-p", "pp=2", "-p", "at=1+3,last-2", "-p", "order=pp_first", "-p", "keep=products/2"]
    done = command("plan", *usual, *given)
    assert done.exit_code == 0, done.stderr
    (planned,) = tmp_path.glob(f"runs/*/{PLANNED}")
    scope: dict[str, Any] = {}
    exec(compile(planned.read_text(), str(planned), "exec"), scope)
    found = piper.load_strategy(planned.with_name("best.json"))
    assert scope["strategy"].directives == found.directives and found.mesh == scope["strategy"].mesh
    assert "at=(" in planned.read_text() and "order=" in planned.read_text()
    for text, words in (
        ("tp=3", "-p tp=3: accepted are the divisors of 4 devices"),
        ("at=odd", "-p at=odd: accepted are even, cost"),
        ("depth=2", "-p depth=2: the parameters are tp, cp"),
        ("keep=", "-p keep=: recompute(where(layer=ANY), keep=''"),
    ):
        for name in ("plan", "tune"):
            done = command(name, *usual, "-p", text)
            assert done.exit_code == 2 and words in done.stderr, done.stderr
    file.write_text(JOB + "strategy = lambda trial: piper.Strategy(piper.Mesh(), ())\n")
    done = command("tune", *usual, "-p", "tp=2")
    words = f"-p: {file} has a strategy of its own"
    assert done.exit_code == 2 and words in done.stderr, done.stderr


def test_every_parameter_is_documented() -> None:
    page = Path(__file__).parents[2].joinpath("docs/tuning.md").read_text()
    assert [name for name in PARAMETERS if f"`{name}`" not in page] == []
