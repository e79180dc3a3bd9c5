"""Numbers that no batch, model or machine can have: refused by name, at once, before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import piper
from piper_compiler import synthetic
from piper_ir.ground.errors import PiperError
from piper_ir.ground.limits import MOST_NODES, MOST_RANKS
from piper_simulator import load_cluster, simulate
from tests.helpers.cases import each_case
from tests.helpers.command_line import RECIPE, command, fails

HUGE = 999_999_999_999
SPACE = """
def strategy(trial):
    m = trial.suggest_categorical("microbatches", (2, 4))
    return piper.Strategy(piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=m))
"""
RECIPES = ("gpipe", "one_f_one_b", "interleaved", "looped_bfs", "zb_h1", "interleaved_zb", "zbv", "dualpipe", "dualpipe_v",
           "zero_bubble", "v_half", "v_min")  # fmt: skip


@pytest.fixture
def space(tmp_path: Path) -> Path:
    path = tmp_path / "space.py"
    path.write_text(RECIPE + SPACE)
    return path


@each_case("name", RECIPES)
def test_a_recipe_with_huge_numbers_is_refused(name: str) -> None:
    """At the command line as well as by its function; an even number, for the recipes that want one."""
    fails(
        command("show", "--recipe", name, "--microbatches", 10**12, "--pp", 4),
        name,
        "forwards",
        "at most",
    )
    fails(
        command("show", "--recipe", name, "--microbatches", 2, "--pp", 10**12),
        name,
        "forwards",
        "at most",
    )
    with pytest.raises(ValueError, match=f"{name}.*at most {MOST_NODES} are accepted"):
        getattr(piper.recipes, name)(pp=4, microbatches=10**12)


def test_chunks_count(tmp_path: Path) -> None:
    fails(command("show", "--recipe", "interleaved", "--chunks", HUGE), "forwards", "at most")


def test_a_mesh_has_so_many_ranks_as_machines_have() -> None:
    assert piper.Mesh(dp=MOST_RANKS).world == MOST_RANKS
    with pytest.raises(
        ValueError,
        match=rf"Mesh\(pp=2, dp={MOST_RANKS}\): {2 * MOST_RANKS} ranks; at most {MOST_RANKS}",
    ):
        piper.Mesh(pp=2, dp=MOST_RANKS)


def test_a_saved_strategy_says_where_its_mesh_is_too_large(recipe: Path) -> None:
    saved = recipe.with_suffix(".json")
    saved.write_text(
        '{"format": "Strategy", "version": 1, "mesh": {"dp": 999999999999}, "directives": []}'
    )
    fails(command("simulate", recipe, "--strategy", saved), f"{saved}.mesh", "at most")


def test_a_cluster_has_so_many_devices_as_machines_have(recipe: Path, tmp_path: Path) -> None:
    assert load_cluster(f"h100x8*{MOST_RANKS // 8}").devices == MOST_RANKS
    for name in (f"h100x8*{HUGE}", f"h100x{HUGE}", f"h100x8*2+a100x8*{HUGE}"):
        fails(command("simulate", recipe, "--cluster", name), "devices", f"at most {MOST_RANKS}")
        fails(command("run", recipe, "--emulate", name), "devices", f"at most {MOST_RANKS}")
    file = tmp_path / "lab.toml"
    file.write_text(f'device = "h100-80g-sxm"\n[nodes]\ncount = {HUGE}\n')
    fails(command("simulate", recipe, "--cluster", file), "lab.toml", f"at most {MOST_RANKS}")


@pytest.mark.parametrize(
    ("microbatches", "says"),
    [
        (16, "8 rows does not divide into 16 microbatches"),
        (10**12, "nodes in each microbatch; use at most"),
    ],
)
def test_more_microbatches_than_rows_are_refused(
    recipe: Path, microbatches: int, says: str
) -> None:
    recipe.write_text(
        RECIPE
        + f"strategy = piper.Strategy(piper.Mesh(), [piper.split(where(), {microbatches})])\n"
    )
    fails(command("simulate", recipe), says)


def test_without_a_batch_the_nodes_of_the_graph_are_counted() -> None:
    program = synthetic(stages=2, F=1, I=1, W=1)
    most = MOST_NODES // 4
    strategy = piper.Strategy(piper.Mesh(), [piper.split(piper.where(), most + 1)])
    with pytest.raises(
        ValueError, match=rf"4 nodes in each microbatch; use at most {most} .*\[split condition 5\]"
    ):
        piper.compile(program, strategy)


def test_steps_of_a_simulation_fit_into_memory() -> None:
    plan = piper.compile(synthetic(stages=2, F=1, I=1, W=1), piper.Strategy(piper.Mesh(), [])).plan
    assert simulate(plan, steps=100).step_s == 6
    with pytest.raises(
        ValueError,
        match=r"simulate\(steps=1000000000000\): at most \d+ steps of a plan of 3 instructions",
    ):
        simulate(plan, steps=10**12)


def test_repetitions_and_jitter_are_bounded(recipe: Path) -> None:
    for repetitions in (10**12, 100_001):
        fails(
            command("simulate", recipe, "--jitter", 0.1, "--repetitions", repetitions),
            "repetitions",
            "100000",
        )
    for jitter in ("1e308", "11", "nan", "inf", "-1"):
        fails(command("simulate", recipe, "--jitter", jitter), "jitter", "from 0 to 10")


def test_workers_are_bounded_by_the_machine(space: Path) -> None:
    result = command(
        "tune", space, "--workers", "99999999999", "--trials", 2, "--out", space.parent / "runs"
    )
    fails(result, "--workers 99999999999", "at most", "cores")


@pytest.mark.parametrize("seed", [-1, 2**32, 2**64, 2**80])
def test_seeds_of_a_search_have_a_range(space: Path, seed: int) -> None:
    result = command("tune", space, "--seed", seed, "--trials", 2, "--out", space.parent / "runs")
    fails(result, f"--seed {seed}", "from 0 to 4294967295")


def test_a_large_seed_searches(space: Path) -> None:
    args = ("--seed", 2**32 - 1, "--trials", 2, "--workers", 0, "--cluster", "h100x8")
    assert command("tune", space, *args, "--out", space.parent / "runs").exit_code == 0


@pytest.mark.parametrize("size", ["float('inf')", "float('nan')", "-1", "0", "'25'", "True"])
def test_a_bucket_has_a_size(recipe: Path, size: str) -> None:
    recipe.write_text(
        RECIPE
        + f"strategy = piper.Strategy(piper.Mesh(dp=2), piper.recipes.data_parallel(bucket_mb={size}))\n"
    )
    fails(
        command("simulate", recipe),
        "bucket_mb must be positive and finite",
        "[replicate condition 5]",
    )


def test_a_bucket_larger_than_any_model_holds_all_of_it(recipe: Path) -> None:
    recipe.write_text(
        RECIPE
        + "strategy = piper.Strategy(piper.Mesh(dp=2), piper.recipes.data_parallel(bucket_mb=1e308))\n"
    )
    assert command("simulate", recipe, "--cluster", "h100x8").exit_code == 0


@each_case(
    "times", ["1e308,1e308,1e308", "1,1,1e16", "nan,1,1", "inf,1,1", "-1,1,1", "1,1", "", "a,b,c"]
)
def test_times_of_a_recipe_are_bounded(times: str) -> None:
    fails(
        command("show", "--recipe", "gpipe", f"--times={times}"),
        f"--times {times}",
        "seconds of F, I, W",
    )


def test_times_of_a_synthetic_program_are_bounded() -> None:
    for bad in (1e308, float("nan"), -1.0):
        with pytest.raises(ValueError, match="seconds"):
            synthetic(stages=2, F=bad, I=1, W=1)


@each_case(
    "value",
    ["nan", "NaN", "Infinity", "-1", "text", "[1, 2]", '["a", "b", "c", "d"]', "{}", "true"],
)
def test_a_memory_limit_of_a_recipe_is_a_number(value: str) -> None:
    fails(command("show", "--recipe", "zero_bubble", "-p", f"memory_limit={value}"), "memory_limit")


def test_nothing_in_bounds_is_refused() -> None:
    for accepted in (
        command(
            "show", "--recipe", "gpipe", "--pp", 2, "--microbatches", 64, "--times", "1e9,1e9,1e9"
        ),
    ):
        assert accepted.exit_code == 0, accepted.output


def test_errors_are_value_errors() -> None:
    refused: tuple[Callable[[], object], ...] = (
        lambda: piper.Mesh(dp=HUGE),
        lambda: load_cluster(f"h100x{HUGE}"),
    )
    for call in refused:
        with pytest.raises(ValueError, match="at most") as caught:
            call()
        assert isinstance(caught.value, PiperError)


@each_case("value", ["nan", "text", "{}", "9" * 400, "[1]", "-1"])
def test_activations_of_a_recipe_are_numbers(value: str) -> None:
    fails(command("show", "--recipe", "gpipe", "-p", f"activation={value}"), "activation")


@each_case("name", ["x" * 300, "a\0b"])
@each_case(
    "order",
    ["simulate", "show", "tune", "run", "explain", "verify", "recipes", "profile", "report"],
)
def test_a_name_that_no_file_can_have_is_no_file(name: str, order: str) -> None:
    fails(command(order, name), name[:1])


def test_a_cluster_file_that_is_nested_too_deep_is_no_cluster(recipe: Path) -> None:
    deep = recipe.with_suffix(".json")
    deep.write_text("[" * 100_000)
    fails(command("simulate", recipe, "--cluster", deep), str(deep), "not JSON")


@pytest.mark.parametrize(
    "limit", ["9" * 30, "9" * 400, "9" * 400 + "TiB", "20", "0", "nan", "-1", ""]
)
def test_a_memory_limit_is_one_that_a_device_may_have(space: Path, limit: str) -> None:
    args = ("tune", space, "--trials", 1, "--cluster", "h100x8", "--out", space.parent / "runs")
    fails(command(*args, f"--memory-limit={limit}"), "--memory-limit", "20GiB")
