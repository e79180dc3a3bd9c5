"""`piper plan` from a source to ranked strategies and a file that every other command takes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import piper
from piper import cli, models
from piper.cli.actions import planning
from piper.planning import answer_text, answers
from piper.planning.answer_text import table
from piper.planning.answers import (
    Answer,
    PlannedStrategy,
    TrainingBudget,
    answer,
    contended,
    row_warnings,
    structures,
)
from piper.planning.failures import failure
from piper.planning.goodput import Failures
from piper.planning.sources import StepSize, count, understand
from piper.planning.written import PLANNED
from piper_autotune import Study
from piper_ir.ground.errors import JobError
from piper_ir.study.study import Row
from piper_ir.tools import size_text
from piper_simulator import Device, load_cluster, simulate, step_interval
from tests.helpers.cases import each_case
from tests.planning.test_config_files import GPT2, LLAMA, written

CLUSTER = "h100x8@eager"
SMALL = ["--length", "64", "--global-batch", "16", "--trials", "6", "--workers", "0"]
OTHER = piper.Strategy(piper.Mesh(dp=8), ())
OWN = """
import piper
job = piper.models.job(piper.models.LlamaConfig(
    layers=2, width=64, heads=8, kv_heads=2, hidden=96, vocab=128, length=64), global_batch=16)
strategy = piper.Strategy(piper.Mesh(dp=2), piper.recipes.data_parallel())
"""


def command(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["plan", *map(str, arguments)])


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a config.json and results, and what the command printed."""
    folder = tmp_path_factory.mktemp("plan")
    source = written(folder, LLAMA)
    out = folder / "runs"
    tokens = ["--tokens", "1M", "--price", "3", "--mtbf", "10"]
    return folder, command(source, "--cluster", CLUSTER, *SMALL, *tokens, "--out", out)


def test_strategies_that_differ_in_structure_are_ranked(planned: tuple[Path, Any]) -> None:
    _, done = planned
    assert done.exit_code == 0, done.stderr
    first, title, head, *rows = done.stdout.splitlines()
    assert "a decoder of 0M parameters, 2 layers; 16 rows of 64 tokens per step (1,024)" in first
    assert CLUSTER in title and head.split()[-3:] == ["goodput", "days", "dollars"]
    assert "MFU: model FLOPs: 6 N + 12 L h s per token, N with all embeddings" in done.stdout
    ranked = [row for row in rows if row[:1].isdigit()]
    words: list[str] = []
    for row in rows:
        if row in ranked:
            words.append("")
        elif row.startswith(" "):
            words[-1] += f" {row.strip()}"
    assert all("CUDA context" in text or "group communicators" in text for text in words)
    assert len(ranked) >= 3 and "faster than the second" in done.stdout
    assert "exposed messages" in done.stdout
    assert len({text.partition("; ")[0] for text in words}) == len(words), (
        "they differ in words, too"
    )


def test_the_file_is_for_people_and_is_the_best_strategy(planned: tuple[Path, Any]) -> None:
    folder, _ = planned
    (file,) = folder.glob(f"runs/*/{PLANNED}")
    assert len(file.read_text().splitlines()) <= 40
    best = piper.load_strategy(file.parent / "best.json")
    simulated = CliRunner().invoke(cli.app, ["explain", str(file), "--json"])
    assert simulated.exit_code == 0, simulated.stderr
    scope: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    plans = [piper.compile(scope["job"], one).plan for one in (scope["strategy"], best)]
    assert plans[0] == plans[1]
    page = (file.parent / "report" / "report.html").read_text()
    assert page.index('id="table-strategies"') < page.index('<section id="summary">')
    assert "faster than the second" in page[: page.index('<section id="summary">')]


@pytest.mark.long
def test_json_is_one_object_with_the_fields_that_programs_read(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    out = ["--trials", 2, "--workers", 0, "--out", tmp_path, "--json"]
    done = command(path, "--cluster", CLUSTER, *out)
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    assert {"job", "strategies", "warnings", "own"} == said.keys()
    assert said["own"]["mesh"] == "dp=2" and said["own"]["own"]
    seen = step_interval(1.0, load_cluster(CLUSTER))
    for one in said["strategies"]:
        share = one["high_s"] / one["period_s"]
        assert share == pytest.approx(seen.high) and one["fits"]
        assert one["low_s"] == pytest.approx(one["period_s"] / share)
        assert one["device_bytes"] > 0 and one["days"] is None and one["dollars"] is None
        assert one["tokens_per_s_per_device"] > 0 and 0 < one["mfu"] < 1
    periods = [one["period_s"] for one in said["strategies"]]
    assert periods == sorted(periods)


def made_up(size: int, **changed: Any) -> PlannedStrategy:
    """A strategy with widths that are seldom more."""
    plain = PlannedStrategy(
        piper.Strategy(piper.Mesh(dp=size), ()), f"pp=16, dp={size}, cp=2, ep=8, tp=8", "2 stages, zero=3, " * 9,
        12.3456, 10.2345, 17.8901, 123_456.0, 0.123, 81_234_567_890, "buffers of the software stack 12.34 GiB", True,
        10.0, 2.0, 0.3456, 0.987, 1_234.5, 123_456_789.0, False, 3000.0,
    )  # fmt: skip
    return replace(plain, **changed)


def test_a_table_is_at_most_120_columns_wide_and_says_why_the_own_layout_differs() -> None:
    mine = made_up(4, own=True, fits=False, period_s=24.6912, compute_s=20.0)
    study = Study("", None, 0, ())
    space: Any = None  # of which no text is
    found = Answer((made_up(8), made_up(2)), mine, study, "", (), space, None, None)
    said = table(understand("llama3-8b", StepSize(rows=8)), found, CLUSTER)
    assert max(map(len, said.lines())) <= 120 < len(said.below[0])
    text = " ".join(said.plain().split())
    figures = (
        "12.35 s (10.23 s to 17.89 s) 123,456 12.3% 75.66 GiB 98.7%, 50 min 1,234.5 123,456,789"
    )
    assert figures in text
    assert "pp=16, dp=8, cp=2, ep=8, tp=8: 2 stages" in text and "does not fit; most memory" in text
    assert (
        "yours takes 100.0% more time per step than the first, and does not fit, on as much" in text
    )
    assert "memory per device: compute 20 s beside 10 s, exposed messages 2 s beside 2 s" in text


def test_a_warning_names_the_rows_that_it_is_about() -> None:
    first, second, mine = (made_up(size, own=size == 4) for size in (1, 2, 4))
    of_all = [one.strategy for one in (first, second, mine)]
    warned = {"all": of_all, "some": of_all[1:], "whole": [], "elsewhere": [OTHER]}
    assert row_warnings(warned, [first, second, mine]) == ("all", "rows 2, yours: some", "whole")


def test_a_step_has_as_many_tokens_as_are_asked_for() -> None:
    assert StepSize(tokens_per_step=4_000_000).global_batch(8192) == 512, "a power of two is near"
    assert StepSize(tokens_per_step=3_000_000).global_batch(8192) == 366
    assert StepSize(rows=7).global_batch(8192) == 7
    assert not StepSize(tokens_per_step=8_200).warnings(8192)
    (one,) = StepSize(tokens_per_step=5_000).warnings(8192)
    assert (
        one
        == "--tokens-per-step 5,000: a step is 1 row of 8,192 tokens, 8,192; one row is the least"
    )
    assert [count(text, "--tokens") for text in ("8192", "4M", "1.5T")] == [
        8192,
        4_000_000,
        1_500_000_000_000,
    ]
    assert {count(x, "--tokens") for x in ("1e6", "1m", "1,000,000", "1_000_000")} == {1_000_000}
    with pytest.raises(JobError, match=r"K, M, B or G, T"):
        count("1,5M", "--tokens")  # a comma of decimals is no comma of thousands


@each_case(
    ("source", "wanted", "says"),
    [
        ("llama9-3b", StepSize(rows=8), "no such preset or file; accepted are gpt3-175b"),
        ("llama3-8b", StepSize(), "--tokens-per-step, such as 4M, or --global-batch"),
        ("llama3-8b", StepSize(rows=8, tokens_per_step=9), "one of them"),
    ],
)
def test_a_source_that_says_too_little_is_one_message(
    source: str, wanted: StepSize, says: str
) -> None:
    with pytest.raises(JobError) as error:
        understand(source, wanted)
    assert says in str(error.value)


@each_case(
    ("arguments", "says"),
    [
        (["nothing.json", "--cluster", "WRONG"], "nothing.json: there is no such preset or file"),
        (["nothing.py", "--cluster", "WRONG"], "the file nothing.py: there is no such file"),
        (["megatron:nothing.sh", "--cluster", "WRONG"], "nothing.sh: there is no such file"),
        (["torchtitan:llama3_8b", "--cluster", "WRONG"], "unknown cluster 'WRONG'"),
        (["llama3-8b", "--global-batch", 8, "--tokens", "much"], "--tokens much: a number such as"),
        (["llama3-8b", "--global-batch", 8, "--workers", "ray"], "valid integer"),
        (["llama3-8b", "--global-batch", 8, "--cluster", "cpu-local"], "a plan is for a cluster"),
        (["llama3-8b", "--global-batch", 8, "--cluster", "h100x8*"], "h100x8*"),
        (["own.py", "--length", 8], "leave --length"),
        (["", "--global-batch", 8], "an empty text: there is no such preset"),
        (
            ["llama3-8b", "--tokens-per-step", 4_000],
            "a row has 8,192 tokens, and one row is the least",
        ),
        (["llama3-8b", "--global-batch", 8, "--price", 2], "give its tokens, such as --tokens 15T"),
        (
            ["llama3-8b", "--global-batch", 8, "--restart-s", 2],
            "--restart-s: it counts where devices fail",
        ),
    ],
)
def test_bad_input_at_the_command_line_has_exit_code_2(
    arguments: list[Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    done = command(*arguments)
    assert done.exit_code == 2 and says in done.stderr, done.output
    assert not list(tmp_path.glob("runs/*"))


def test_learned_positions_bound_the_length(tmp_path: Path) -> None:
    source = str(written(tmp_path, GPT2))
    assert understand(source, StepSize(64, rows=8)).job.tokens_per_row == 64
    with pytest.raises(JobError, match="--length 65: the model has learned positions for 64"):
        understand(source, StepSize(65, rows=8))
    rotary = str(written(tmp_path, LLAMA))
    longest = understand(rotary, StepSize(rows=8)).job.tokens_per_row
    assert longest is not None and not understand(rotary, StepSize(longest, rows=8)).warnings
    (beyond,) = understand(rotary, StepSize(longest + 1, rows=8)).warnings
    assert "positions are not scaled" in beyond


NEIGHBOURED = """
import sizes
job = sizes.job
strategy = sizes.strategy
"""


def test_a_file_with_neighbours_is_planned_and_a_strategy_that_is_too_large_has_no_row(
    tmp_path: Path,
) -> None:
    (tmp_path / "sizes.py").write_text(OWN.replace("dp=2", "dp=16"))
    path = tmp_path / "own.py"
    path.write_text(NEIGHBOURED)
    out = ["--trials", 2, "--workers", 0, "--out", tmp_path, "--json"]
    done = command(path, "--cluster", CLUSTER, *out)
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    assert "own" not in said and "16 ranks" in " ".join(said["warnings"])
    sys.modules.pop("sizes")
    (file,) = tmp_path.glob(f"plan-own-*/{PLANNED}")
    assert CliRunner().invoke(cli.app, ["explain", str(file)]).exit_code == 0


@pytest.mark.long
def test_a_training_that_never_goes_on_has_no_days() -> None:
    small = models.job(
        models.LlamaConfig(layers=1, width=32, heads=2, kv_heads=2, hidden=32, vocab=64, length=64),
        global_batch=8,
    )
    mixed = replace(load_cluster("h100x8"), nodes=priced(1.0, 9.0), per_node=1)
    (one, *_) = answer(small, mixed, TrainingBudget(10**9), trials=1, workers=0).strategies
    assert one.days is not None and one.dollars == pytest.approx(one.days * 24 * 10)
    never = TrainingBudget(10**9, 1.0, Failures(1.0))
    (one, *_) = answer(small, mixed, never, trials=1, workers=0).strategies
    assert one.goodput == 0.0 and one.days is one.dollars is None


def test_what_waits_on_hosts_is_in_the_words_of_a_strategy() -> None:
    small = models.job(
        models.LlamaConfig(layers=1, width=32, heads=2, kv_heads=2, hidden=32, vocab=64, length=64),
        global_batch=8,
    )
    waiting = (
        piper.split(piper.where(), microbatches=1),
        *piper.recipes.data_parallel(zero=1),
        piper.offload(piper.where(), tensors="optim"),
    )
    own = piper.Strategy(piper.Mesh(dp=8), waiting)
    found = answer(small, load_cluster("h100x8"), TrainingBudget(), own, trials=1, workers=0)
    assert found.own is not None and found.own.host_bytes > 0
    assert f"on a node's host: {size_text(found.own.host_bytes)}" in answer_text._words(found.own)
    assert not any("host" in answer_text._words(o) for o in found.strategies if not o.host_bytes)


def priced(*prices: float) -> tuple[tuple[int, Device], ...]:
    """A node of one device for each price."""
    device = load_cluster("h100x8").device
    return tuple((1, replace(device, price_per_hour=price)) for price in prices)


def test_a_class_that_no_model_here_is_is_told_the_way_out(tmp_path: Path) -> None:
    source = written(tmp_path, LLAMA | {"quantization_config": {"bits": 4}})
    done = command(source, "--global-batch", 8)
    assert done.exit_code == 2 and "no description says a llama" in done.stderr
    assert "docs/models.md" in done.stderr


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of it fails
sys.argv = ["piper", "plan", "llama3-8b", "--cluster", "h100x8", "--global-batch", "8"]
from piper.cli.entry import main
main()
"""


def test_the_first_line_comes_before_torch_is_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert done.stderr.startswith("planning llama3-8b for h100x8\n")
    assert done.returncode and "torch" in done.stderr.partition("\n")[2]


@each_case(("text", "says"), [("", "is no JSON"), ("[1]", "an object with model_type is needed")])
def test_a_broken_config_is_refused_before_torch_is_loaded(
    text: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(text)
    code = WITHOUT_TORCH.replace("llama3-8b", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and says in done.stderr and "import of torch" not in done.stderr


@pytest.mark.parametrize("asked", ["in the search", "among the best"])
def test_an_interrupt_leaves_the_strategies_until_then(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGINT, as Ctrl-C sends it, after the third candidate, or while the second of the best is simulated."""
    seen: list[object] = []

    def interrupt(number: int) -> None:
        seen.append(None)
        if len(seen) == number:
            signal.raise_signal(signal.SIGINT)

    def simulated(*given: Any) -> Any:
        interrupt(2)
        return simulate(*given)

    if asked == "among the best":
        monkeypatch.setattr(answers, "simulate", simulated)
    found = answer(
        understand(str(written(tmp_path, LLAMA)), StepSize(64, rows=16)).job,
        load_cluster("h100x8"),
        TrainingBudget(),
        trials=6,
        workers=0,
        progress=None if asked == "among the best" else lambda now: interrupt(3),
    )
    assert found.study.interrupted and found.strategies and found.best is not None
    if asked == "in the search":
        assert len(found.study.rows) == 3
    else:
        assert len(found.strategies) == 1


@pytest.mark.long
def test_where_nothing_fits_the_nearest_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = load_cluster("h100x8").each_device(lambda device: replace(device, memory_bytes=2**20))
    monkeypatch.setattr(planning, "cluster_named", lambda name: small)
    source = written(tmp_path, LLAMA)
    done = command(source, "--cluster", "small", *SMALL, "--out", tmp_path)
    assert done.exit_code == 2 and "memory_limit" not in done.stdout
    *_, last = done.stdout.splitlines()
    assert "DOES NOT FIT: the nearest of " in last and "devices of this kind" in last
    (folder,) = tmp_path.glob("plan-*")
    assert str(folder) in done.stderr
    shown = CliRunner().invoke(cli.app, ["report", str(folder)])
    assert shown.exit_code == 0 and "the report is" in shown.stdout, shown.output
    assert "DOES NOT FIT: the nearest of " in (folder / "report" / "report.html").read_text()
    assert (folder / "study.json").is_file() and not (folder / PLANNED).exists()
    asked = answer(
        understand(str(source), StepSize(64, rows=16)).job, small, TrainingBudget(), trials=1
    )
    assert not asked.strategies and asked.best is None and not list(structures(asked.study))


@each_case(
    "slower",
    [
        # with contention / without; the rows that are predicted
        ((1.0,) * 12, 5),  # nothing is slower: those behind the first five cannot be the best
        ((9.0, 9.0, 9.0, 9.0, 9.0, 1.0, 1.0), 6),  # the sixth is the best
        ((9.0,) * 12, 10),  # twice as many as are shown, and no more
    ],
)
def test_rows_that_could_be_the_best_with_contention_are_predicted(
    slower: tuple[tuple[float, ...], int],
) -> None:
    factors, predicted = slower
    rows = [Row(k, "complete", {}, period_s=1 + k / 10) for k in range(len(factors))]

    def predict(row: Row) -> Any:
        return SimpleNamespace(fits=True, period_s=(row.period_s or 0) * factors[row.number])

    made = list(contended(rows, predict))
    assert len(made) == predicted
    assert min(one.period_s for one in made) == min(
        predict(row).period_s for row in rows[: 2 * len(made)]
    )


def test_a_batch_that_no_layout_divides_is_told_the_way_out() -> None:
    rows = tuple(Row(k, "rejected", {}, reason="5 rows", kind="skipped") for k in range(3))
    text = failure(rows, load_cluster("h100x8"), 5, "")
    assert "no layout divides 5 rows among 8 devices (5 rows)" in text and "such as 8, or" in text
    text = failure(
        rows, load_cluster("h100x8"), 16, ""
    )  # which they divide: another number is no way out
    assert text == "NO STRATEGY: the values asked for do not go together; the first: 5 rows"
