"""`piper simulate --why`, and of two strategies."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from piper.cli.actions.predicting import Target, load_named, one_more
from piper.cli.loading import load_file
from piper.views.recipe_view import Pipeline, shown
from piper.views.why_tables import MOST, comparison_tables, why_tables
from piper_ir.ground.errors import JobError
from piper_simulator import Zipf, compare, simulate, why
from tests.cli.test_cli import RECIPE, fails, piper
from tests.helpers.cases import each_case

ON = ("--cluster", "h100x8")
FUNCTION = """
params = {"recipe": "gpipe", "microbatches": 4}
def strategy(trial):
    m = trial.suggest_categorical("microbatches", (2, 4))
    recipe = getattr(piper.recipes, trial.suggest_categorical("recipe", ("gpipe", "one_f_one_b")))
    return piper.Strategy(piper.Mesh(pp=2), recipe(pp=2, microbatches=m))
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("why") / "recipe.py"
    path.write_text(RECIPE + FUNCTION)
    return path


def test_why_prints_every_part(file: Path) -> None:
    text = piper("simulate", file, *ON, "--why").stdout
    titles = (
        "critical path of the step (",
        "critical path in order",
        "what ranks do in a step",
        "longest idle gaps",
        "what if",
    )
    for title in (
        *titles,
        "sensitivity of the step",
        "costs from formulas",
        "no interval by the spread of costs: none has one",
    ):
        assert f"\n{title}" in text, title
    assert "\none microbatch more" in text and "% rows per second" in text
    assert re.search(r"instructions +time alone +on the critical path", text), (
        "the path's part may be longer: it is slowed"
    )


def test_why_for_programs_adds_up(file: Path) -> None:
    numbers = json.loads(piper("simulate", file, *ON, "--why", "--json").stdout)
    found = numbers["why"]
    assert found["step_s"] == numbers["step_s"]
    assert sum(p["end"] - p["start"] for p in found["critical_path"]) == pytest.approx(
        numbers["step_s"]
    )
    for role in found["roles"]:
        assert sum(role[k] for k in ("computing", "bubble", "waiting", "host")) == pytest.approx(
            numbers["step_s"]
        )


def test_one_microbatch_more_is_a_simulation_of_it(file: Path) -> None:
    """Of 5 microbatches of 2 rows instead of 4, although the strategy offers 2 and 4 only."""
    recipe, target = load_file(file), Target("h100x8", None)
    row = one_more(recipe, target.compiled(recipe), target, 1.0)
    grown = file.with_name("grown.py")
    grown.write_text(
        file.read_text().replace("global_batch=8", "global_batch=10").replace("(2, 4)", "(2, 5)")
    )
    expected = target.compiled(load_file(grown, {"microbatches": "5"})).plan
    assert (expected.microbatches, expected.rows) == (5, 2)
    assert row.step_s == simulate(expected, target.cluster).step_s


def test_a_strategy_that_does_not_say_its_microbatches_has_no_such_row(file: Path) -> None:
    fixed = file.with_name("fixed.py")
    fixed.write_text(
        RECIPE
        + "strategy = piper.Strategy(piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=2))\n"
    )
    text = piper("simulate", fixed, *ON, "--why").stdout
    assert (
        "one microbatch more: none of the strategy's parameters is the number of microbatches"
        in text
    )
    fails(
        piper("simulate", fixed, "--versus", "microbatches=2"),
        "fixed.py",
        "not a function of a trial",
    )


def test_two_values_of_a_parameter(file: Path) -> None:
    found = json.loads(
        piper("simulate", file, *ON, "--versus", "recipe=one_f_one_b", "--json").stdout
    )
    assert (found["a"], found["b"]) == ("recipe.py recipe=gpipe", "recipe.py recipe=one_f_one_b")
    steps = [
        why(Target("h100x8", None).compiled(load_file(file, {"recipe": r})).plan, "h100x8").step_s
        for r in ("gpipe", "one_f_one_b")
    ]
    assert [found["step_s"]["a"], found["step_s"]["b"]] == steps
    for view in ("path", "device"):
        assert sum(row["change"] for row in found[view]) == pytest.approx(steps[1] - steps[0])
    text = piper("simulate", file, *ON, "--versus", "recipe=one_f_one_b").stdout
    assert (
        "critical path: where the difference arises" in text
        and "memory at the peak of the fullest rank" in text
    )
    assert "rows" not in text, "both steps train as many"


def test_two_files_and_a_saved_strategy(file: Path, tmp_path: Path) -> None:
    """-p holds for both files; a saved strategy replaces the second."""
    other = tmp_path / "other.py"
    other.write_text(file.read_text().replace("global_batch=8", "global_batch=16"))
    text = piper("simulate", file, other, *ON, "-p", "microbatches=2").stdout
    assert "the steps differ in their rows: 8 and 16" in text
    changed = json.loads(
        piper("simulate", file, other, *ON, "--versus", "recipe=one_f_one_b", "--json").stdout
    )
    assert (changed["a"], changed["b"]) == (
        "recipe.py recipe=gpipe",
        "other.py recipe=one_f_one_b",
    ), "what differs"
    assert (
        piper("simulate", file, *ON, "-p", "recipe=one_f_one_b", "--out", tmp_path / "a").exit_code
        == 0
    )
    saved = next((tmp_path / "a").glob("*/strategy.json"))
    one, two = (
        json.loads(piper("simulate", file, *args, *ON, "--json").stdout)
        for args in ((saved,), ("--versus", "recipe=one_f_one_b"))
    )
    assert one["b"] == "strategy.json" and one["step_s"] == two["step_s"]
    fails(
        piper("simulate", file, saved, "--versus", "microbatches=2"), "--versus", "saved strategy"
    )


@each_case(
    ("args", "words"),
    [
        (("--versus", "microbatches=3"), ("--versus microbatches=3", "2, 4")),
        (("--versus", "m=3"), ("--versus m", "no parameter", "microbatches")),
        (("--versus", "m"), ("--versus m: NAME=VALUE",)),
        (("nothing.py",), ("nothing.py", "no such file")),
        (("nothing.json",), ("nothing.json", "cannot read")),
        (("--versus", "microbatches=2", "--why"), ("--why", "one strategy")),
        (("--versus", "microbatches=2", "--out", "x"), ("--out", "one strategy")),
    ],
)
def test_what_cannot_be_compared_is_said(
    file: Path, args: tuple[str, ...], words: tuple[str, ...]
) -> None:
    fails(piper("simulate", file, *args), *words)


@pytest.mark.parametrize("args", [("--cluster", "h100x1"), (*ON, "--jitter", "-1")])
def test_what_is_refused_leaves_no_folder(
    file: Path, tmp_path: Path, args: tuple[str, ...]
) -> None:
    assert piper("simulate", file, *args, "--out", tmp_path / "out").exit_code == 2
    assert not (tmp_path / "out").exists()


def test_without_contention(file: Path) -> None:
    both = [
        json.loads(piper("simulate", file, *ON, *args, "--json").stdout)
        for args in ((), ("--no-contention",))
    ]
    assert both[0]["slowed_s"] is not None and both[1]["slowed_s"] is None
    found = json.loads(piper("simulate", file, *ON, "--no-contention", "--why", "--json").stdout)[
        "why"
    ]
    assert found["slowed_s"] == 0 and "no interference" not in [
        row["name"] for row in found["what_if"]
    ]
    apart = json.loads(
        piper(
            "simulate", file, "--versus", "microbatches=2", *ON, "--no-contention", "--json"
        ).stdout
    )
    assert apart["step_s"]["a"] == both[1]["step_s"]


def test_jitter_prints_percentiles(file: Path) -> None:
    args = ("simulate", file, *ON, "--jitter", "0.05", "--repetitions", "20", "--seed", "3")
    text = piper(*args).stdout
    assert (
        "\ndurations that vary by 0.05 (lognormal)" in text
        and "20 repetitions, seed 3; 2 of 2 ranks drew" in text
    )
    found = json.loads(piper(*args, "--json").stdout)["distribution"]
    for of in ("step_s", "period_s"):
        assert found[of]["p5"] < found[of]["median"] < found[of]["p95"]
    assert json.loads(piper(*args, "--json").stdout)["distribution"] == found


@each_case(
    ("args", "words"),
    [
        (("--jitter", "-0.1"), ("jitter is -0.1", "from 0 to 10")),
        (("--jitter", "nan"), ("jitter is nan",)),
        (("--jitter", "much"), ("--jitter", "valid number")),
        (
            ("--jitter", "0.1", "--repetitions", "0"),
            ("--repetitions", "greater than or equal to 1"),
        ),
        (("--repetitions", "9"), ("--repetitions and --seed belong to --jitter",)),
        (("--jitter", "0.1", "--versus", "microbatches=2"), ("--jitter", "one strategy")),
    ],
)
def test_jitter_that_cannot_be(file: Path, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    fails(piper("simulate", file, *ON, *args), *words)


def test_a_slow_rank_and_two_types_are_explained(file: Path, tmp_path: Path) -> None:
    """pp=2: stage 0 on an A100 that is slow besides, stage 1 on an H100."""
    nodes = "".join(
        f'[[nodes]]\ndevice = "{device}"\ncount = 1\n'
        for device in ("a100-80g-sxm", "h100-80g-sxm")
    )
    (tmp_path / "two.toml").write_text(f"{nodes}[[slow_ranks]]\nrank = 0\nfactor = 3\n")
    text = piper("simulate", file, "--cluster", tmp_path / "two.toml", "--why").stdout
    for part in (
        "recipe on two",
        "slow ranks: rank 0 of pp0, 3 times as long",
        "slow_ranks[3]",
        "h100-80g-sxm.",
    ):
        assert part in text, part
    assert (
        "recipe on a100-80g-sxm:1+h100-80g-sxm:1"
        in piper("simulate", file, "--cluster", "a100x1+h100x1").stdout
    )


def test_tables_of_many_devices_stay_short() -> None:
    gpipe, other = (
        why(shown(name, Pipeline(16, 16)).compiled.plan) for name in ("gpipe", "one_f_one_b")
    )
    path, order, ranks, gaps, _ = why_tables(gpipe)
    assert [len(t.rows) for t in (path, order, ranks, gaps)] == [MOST, MOST + 1, MOST, MOST]
    assert path.notes[0] == "and 20 more owners", "F and B of 16 stages"
    assert ranks.notes == ("and 4 more roles, less idle",)
    assert order.rows[MOST // 2][-1] == "20 more", "of 32: up the 16 stages, and down again"
    _, by_path, *_ = comparison_tables(compare(gpipe, other), ("a", "b"), "nothing")
    assert [row[0] for row in by_path.rows[-2:]] == ["unchanged", "step"] and len(
        by_path.rows
    ) <= MOST + 3


def test_the_page_is_of_today() -> None:
    """`make gallery` has been run since what it shows has changed; of the example on a cluster only its tables must be
    there."""
    docs = Path(__file__).resolve().parents[2] / "docs"
    page, script = (docs / "why.md").read_text(), runpy.run_path(str(docs / "why.py"))
    for name, part in script["parts"]().items():
        assert part in page, f"{name} is not in docs/why.md; run `make gallery`"
    assert all(f"```\n{title}" in page for title in script["SHOWN"])


@each_case(
    ("text", "problem"),
    [
        (
            "nofile.jsonl",
            "--load 'nofile.jsonl': there is no such file or folder; a number such as 1.3, ",
        ),
        ("x" * 300, "': there is no such file or folder; a number"),
        ("", "--load '': it is empty; a number"),
        ("zipf:", "--load zipf:: zipf:S with a number S from 0 on"),
    ],
)
def test_a_load_that_is_none_is_refused(text: str, problem: str) -> None:
    with pytest.raises(JobError, match=problem):
        load_named(text)


def test_a_load_is_a_number_a_distribution_or_a_place(tmp_path: Path) -> None:
    assert [load_named(text) for text in ("1.3", "Zipf:0.3", str(tmp_path))] == [
        1.3,
        Zipf(0.3),
        tmp_path,
    ]
