"""`piper show --recipe`, `piper show --csv`, `piper recipes`, and the gallery that is made with them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import piper
from piper.api.reference.verification import verify_strategy
from piper.cli import app
from piper.cli.loading import load_file
from piper.views.recipe_view import ChunkTimes, Pipeline, shown
from piper_compiler.recipes import RECIPES
from tests.helpers.cases import each_case

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "examples" / "own_recipe.py"


def command(*args: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "140"})


def test_a_recipe_is_drawn_with_its_numbers(tmp_path: Path) -> None:
    png = tmp_path / "zbv.png"
    done = command(
        "show", "--recipe", "zbv", "--pp", 2, "--microbatches", 4, "--times", "1,1,1", "--png", png
    )
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines() == [
        "rank 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3 .",
        "rank 1  .  F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3",
        "",
        "F forward; I input gradient; W weight gradient; the number is the microbatch; lower case: the device's "
        "second chunk; = goes on; . idle",
        "a column is 1 s",
        "",
        "zbv: makespan 25 s, bubble 1 s (4.0%), 0 s of it between a device's first and last instruction",
        "peak 4 activations of a chunk on every device",
        f"{RECIPES['zbv'].formula}; peak 2p on device r",
    ]
    assert png.read_bytes().startswith(b"\x89PNG")


def test_numbers_for_programs() -> None:
    done = command("show", "--recipe", "interleaved", "--chunks", 2, "--times", "3,4,2", "--json")
    assert json.loads(done.stdout) == {
        "recipe": "interleaved", "makespan_s": 171, "global_bubble_s": 27, "span_bubble_s": 27, "bubble_s": [27] * 4,
        "peak_activations": [11, 9, 7, 5],
    }  # fmt: skip
    pair = command(
        "show", "--recipe", "dualpipe_v", "--microbatches", 10, "--times", "1,1,1,3", "--json"
    )
    assert json.loads(pair.stdout)["makespan_s"] == 66


def test_all_recipes_are_listed_with_what_one_must_know() -> None:
    rows = json.loads(command("recipes", "--json").stdout)
    assert {row["name"] for row in rows} == RECIPES.keys()
    for row in rows:
        assert (
            row["source"]
            and row["formula"]
            and row["peak"]
            and row["use"]
            and {"pp", "microbatches"} <= {*row["arguments"]}
        )
    listing = command("recipes").stdout
    assert all(f"{name}\n  formula" in listing for name in RECIPES)


WRONG = {
    "no file": ((), "give a FILE.py that defines `job` and `strategy`, or --recipe NAME"),
    "no such recipe": (("--recipe", "zvb"), "--recipe zvb: no such recipe; there are dualpipe, "),
    "times": (("--recipe", "zbv", "--times", "1,2"), "--times 1,2: seconds of F, I, W"),
    "negative times": (
        ("--recipe", "zbv", "--times", "1,2,-1"),
        "--times 1,2,-1: seconds of F, I, W",
    ),
    "chunks": (
        ("--recipe", "zbv", "--chunks", 3),
        "recipe zbv has no argument 'chunks'; it has pp, microbatches, at",
    ),
    "an option twice": (("--recipe", "zbv", "-p", "pp=3"), "-p pp=3: give it as --pp 3"),
    "illegal": (
        ("--recipe", "dualpipe", "--pp", 3),
        "dualpipe(pp=3): its two directions need an even number of devices",
    ),
    "costs": (
        ("--recipe", "zbv", "--costs", "c.json"),
        "leave out --strategy, --costs and --cluster",
    ),
    "cluster": (
        ("--recipe", "zbv", "--cluster", "h100x8"),
        "leave out --strategy, --costs and --cluster",
    ),
    "two-way": (
        ("--recipe", "dualpipe", "--csv", "never.csv"),
        "a two-way pipeline (DualPipe) cannot be expressed",
    ),
    "lowered": (("--recipe", "zbv", "--lowered"), "--lowered says what --csv FILE.csv writes"),
    "two things": (("--recipe", "zbv", "--plan", "--graph"), "are three different things"),
}


@each_case("name", WRONG)
def test_what_is_refused(name: str) -> None:
    args, message = WRONG[name]
    done = command("show", *args)
    assert done.exit_code == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_a_strategy_exported_imports_again_and_trains_like_one_device(tmp_path: Path) -> None:
    """From a job's plan to a file, as a user's strategy back from it, and against plain PyTorch."""
    done = command("show", FILE, "--csv", tmp_path / "s.csv", "--lowered", "--graph", "--json")
    assert done.exit_code == 0 and "for torch.distributed.pipelining is in" in done.stderr
    schedule = piper.read_schedule_csv(tmp_path / "s.csv")
    assert (schedule.stages, schedule.microbatches, schedule.lowered) == (2, 8, True)
    file = load_file(FILE)
    strategy = piper.Strategy(piper.Mesh(pp=2), piper.recipes.from_csv(tmp_path / "s.csv"))
    assert (
        piper.compile(file.job, strategy).plan.roles
        == piper.compile(file.job, file.strategy).plan.roles
    )
    v = shown("dualpipe_v", Pipeline(2, 4))
    piper.write_schedule_csv(v.compiled, tmp_path / "v.csv")
    assert "OVERLAP_F_B" in (tmp_path / "v.csv").read_text()
    folded = piper.Strategy(
        piper.Mesh(pp=2), piper.recipes.from_csv(tmp_path / "v.csv", at=(1, 2, 3))
    )
    assert verify_strategy(file.job, folded, steps=2).equal


def test_the_gallery_is_of_today() -> None:
    """`make gallery` has been run since a recipe was added or a schedule became faster or slower."""
    page = (ROOT / "docs" / "schedules.md").read_text()
    for name in RECIPES.keys() - {"waves"}:  # a recipe of an example, in the same process
        found = re.search(rf"^\| \[{name}\]\(#{name}\) \| (\S+) \|", page, re.MULTILINE)
        assert found, f"{name} is not in docs/schedules.md; run `make gallery`"
        v = max(1, len(shown(name, Pipeline(4, 8)).compiled.plan.chunks) // 4)
        one = shown(name, Pipeline(4, 8), ChunkTimes(1 / v, 1 / v, 1 / v))
        assert float(found[1]) == pytest.approx(one.simulation.step_s)
        assert (ROOT / "docs" / "schedules" / f"{name}.png").is_file()


def test_a_table_of_torch_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    made = piper.Strategy(piper.Mesh(pp=2), piper.recipes.one_f_one_b(pp=2, microbatches=3))
    piper.write_schedule_csv(made, path)
    table, own = (
        command("show", path),
        command("show", "--recipe", "one_f_one_b", "--pp", 2, "--microbatches", 3),
    )
    assert table.exit_code == 0, table.stderr
    assert table.stdout.splitlines()[:2] == own.stdout.splitlines()[:2]
    assert (
        "mine.csv: makespan 12 s" in table.stdout
        and "2 devices, 2 stages, 3 microbatches" in table.stdout
    )
    refused = command("show", path, "--pp", 4)
    assert (
        refused.exit_code == 2
        and "leave out options of strategies and of recipes" in refused.stderr
    )
    path.write_text("a,b\n")
    assert "mine.csv: row 1" in command("show", path).stderr
    other = command("simulate", path)
    assert other.exit_code == 2 and f"`piper show {path}` draws a schedule" in " ".join(
        other.stderr.split()
    )
