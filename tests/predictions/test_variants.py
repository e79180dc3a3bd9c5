"""Kernels, precision and CUDA graphs as choices of a search: scores, captures, bounds and files of each variant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import piper
from piper.api.captures import capturing
from piper.api.problems.job_space import KnownChoices
from piper.api.problems.tuning_problem import Conditions
from piper.api.problems.variant_search import variant_search
from piper.api.problems.variants import PlanVariant, said_by
from piper_autotune import Scored
from piper_autotune.scoring.evaluators import Here
from piper_compiler import Options
from piper_ir.ground.errors import TuneError
from piper_simulator import load_cluster
from tests.helpers.cases import each_case
from tests.helpers.command_line import RECIPE, command, fails

CLUSTER = "h100x4@eager"
SIZES = piper.models.DecoderConfig(
    layers=2, width=64, heads=4, hidden=128, vocab=256, length=64, kv_heads=2
)
JOB = piper.models.job(SIZES, global_batch=16)
VARIANTS: dict[str, Any] = {
    "kernels": ("eager", "inductor"),
    "precision": ("job", "fp8", "float32"),
    "cuda_graph": (False, True),
}
LAYOUTS = (
    {"pp": 2, "rows": 2, "schedule": "1f1b", "keep": "inputs", "zero": 1},
    {"pp": 2, "rows": 2, "schedule": "zb_h1", "keep": "products"},
    {"tp": 2, "rows": 1, "keep": "attention", "zero": 3},
    {"pp": 2, "rows": 2, "schedule": "1f1b", "keep": "all", "zero": 1},
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kernels", [("eager",), VARIANTS["kernels"]], ids=" and ".join)
def test_scores_are_those_of_simulate_and_each_precision_is_captured_once(
    monkeypatch: pytest.MonkeyPatch, kernels: tuple[str, ...]
) -> None:
    captured: list[str] = []
    plain = capturing._capture

    def counted(job: piper.Job, evaluating: bool = False) -> Any:
        captured.append(job.precision.key)
        return plain(job, evaluating)

    monkeypatch.setenv("PIPER_CACHE", "")
    monkeypatch.setattr(capturing, "_capture", counted)
    job = piper.models.job(SIZES, global_batch=8)
    capturing._CAPTURES.clear()
    tried = VARIANTS | {"precision": ("job", "float32"), "kernels": kernels}
    space = piper.space(job, CLUSTER, **tried, cp=1, rows=2, keep="products")
    study = piper.tune(job, space, cluster=CLUSTER, trials=8, workers=0)
    assert len(captured) == len(set(captured)) == 2, captured
    rows = [row for row in study.rows if row.source == "engine"]
    assert len(rows) == 5 and all(said_by(row.params) for row in study.rows)
    for row in rows:
        variant = PlanVariant.of(row.params)
        options = Options(device="cuda", kernels=variant.kernels, cuda_graph=variant.cuda_graph)
        plan = piper.compile(variant.job(job), study.strategies[row.number], options=options).plan
        simulation = piper.simulate(plan, CLUSTER)
        assert row.period_s == simulation.period_s
        assert row.device_bytes == max(simulation.device_bytes)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout["keep"])
def test_bounds_hold_for_each_variant(layout: dict[str, Any]) -> None:
    """No rule rejects a candidate that must be as fast as it is, within the memory that it has."""
    space = piper.space(JOB, CLUSTER, **VARIANTS)
    _, more = variant_search(JOB, space.variants, Conditions(load_cluster(CLUSTER)))
    cases, periods = more["cases"], dict[PlanVariant, float]()
    for variant in space.variants.every():
        said = {f"variant.{name}": value for name, value in vars(variant).items()}
        choices = KnownChoices({**said, **layout})
        strategy = space(choices).with_params(choices.params)
        case = cases.case(strategy)
        here = Here(case.problem, cases.programs(case))
        scored = here.result(here.submit(strategy))
        assert isinstance(scored, Scored), scored
        pruned = cases.check(strategy, scored.period_s)
        assert pruned is None, (variant, pruned)
        periods[variant] = scored.period_s
    for variant, own in periods.items():
        assert periods[PlanVariant(variant.kernels, variant.precision, True)] <= own
    fused, eager = periods[PlanVariant("inductor")], periods[PlanVariant()]
    assert fused < eager, "fewer kernels are launched"


def test_a_space_without_variants_is_as_it_was() -> None:
    plain = piper.tune(JOB, cluster=CLUSTER, trials=6, workers=0)
    asked = piper.tune(JOB, piper.space(JOB, CLUSTER), cluster=CLUSTER, trials=6, workers=0)
    assert plain.rows == asked.rows and not any(said_by(row.params) for row in plain.rows)
    fixed = piper.space(JOB, CLUSTER, kernels="eager", precision="job", cuda_graph=False)
    choices = KnownChoices({})
    assert fixed(choices) == piper.space(JOB, CLUSTER)(KnownChoices({}))
    assert PlanVariant.of(choices.params) == PlanVariant(), "what is fixed is said"


def test_offload_goes_without_graphs() -> None:
    space = piper.space(JOB, CLUSTER, cuda_graph=True)
    object.__setattr__(space.scale, "memory_bytes", 1)  # memory is short
    choices = KnownChoices({"variant.cuda_graph": True, "away": 1.0, "rows": 1})
    with pytest.raises(piper.PiperError, match="everything stays on the device"):
        space(choices)


@each_case(
    ("given", "words"),
    [
        ({"kernels": "cuda"}, r"space\(kernels='cuda'\): eager and inductor are accepted"),
        ({"kernels": ()}, r"space\(kernels=\(\)\): at least one value"),
        ({"precision": "bfloat16"}, r"precision='bfloat16'\): job, float32, bf16, fp16, fp8 and"),
        ({"precision": "fp8:none"}, r"precision='fp8:none'\): .*one of tensorwise"),
        ({"precision": ("bf16", 16)}, r"precision=16\)"),
        ({"cuda_graph": "yes"}, r"space\(cuda_graph='yes'\): False and True are accepted"),
        ({"cuda_graph": 1}, r"space\(cuda_graph=1\)"),
        ({"precision": "fp8", "cluster": "a100x4"}, "a100-80g-sxm has no products in float8"),
        ({"cuda_graph": True, "cluster": "cpu-local"}, "cpu-local is no CUDA device"),
        ({"kernel": "eager"}, r"space\(kernel=...\): accepted are .*kernels, precision, cuda_gr"),
    ],
)
def test_values_that_are_none(given: dict[str, Any], words: str) -> None:
    more = dict(given)
    with pytest.raises(TuneError, match=words):
        piper.space(JOB, more.pop("cluster", CLUSTER), **more)


def test_arguments_of_tune_beside_variants() -> None:
    space = piper.space(JOB, CLUSTER, kernels=("eager", "inductor"))
    with pytest.raises(TuneError, match="kept in memory only"):
        piper.tune(JOB, space, cluster=CLUSTER, storage="sqlite:///none.db")
    with pytest.raises(TuneError, match="measured durations hold for one precision"):
        piper.tune(JOB, space, cluster=CLUSTER, costs=piper.Costs())
    with pytest.raises(TuneError, match=r"is one of a piper\.Job"):
        piper.tune(lambda trial: JOB, space, cluster=CLUSTER)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A job alone."""
    path = tmp_path / "job.py"
    path.write_text(RECIPE)
    return path


def test_files_of_a_plan_say_the_variant(file: Path, tmp_path: Path) -> None:
    asked = ("--kernels", "inductor", "--precision", "bf16", "--cuda-graph", "both")
    where = ("--cluster", "h100x2@eager", "--json")
    made = command("plan", file, *where, *asked, "--trials", 4, "--out", tmp_path, "--workers", 0)
    assert made.exit_code == 0, made.output
    best = json.loads(made.stdout)["strategies"][0]
    assert best["params"]["variant.precision"] == "bf16"
    folder = tmp_path / "plan-job-001"
    planned, text = folder / "planned.py", (folder / "planned.py").read_text()
    assert "options = piper.Options(kernels='inductor', cuda_graph=True)" in text
    saved = ("--strategy", folder / "best.json")
    for arguments in ((planned,), (planned, *saved), (file, *saved)):
        told = command("simulate", *arguments, *where)
        assert json.loads(told.stdout)["period_s"] == best["period_s"], arguments
    plain = command("simulate", planned, *where, "--kernels", "eager")
    assert json.loads(plain.stdout)["period_s"] != best["period_s"], "the command's own word counts"


@each_case(
    ("options", "words"),
    [
        (("--kernels", "eager,cuda"), "--kernels cuda: eager and inductor are accepted"),
        (("--kernels", "eager,"), "a name is needed before and after each comma"),
        (("--precision", "fp9"), "--precision fp9: job, float32"),
        (("--cuda-graph", "maybe"), "--cuda-graph maybe: one of off, on, both"),
    ],
)
def test_bad_values_at_the_command_line(options: tuple[str, ...], words: str, file: Path) -> None:
    for name in ("plan", "tune"):
        fails(command(name, file, "--cluster", "h100x2", *options), words)


def test_a_strategy_of_ones_own_has_no_variants(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(RECIPE + "def strategy(trial):\n    return piper.Strategy(piper.Mesh(), ())\n")
    fails(command("tune", own, "--precision", "bf16"), "--precision", "a strategy of its own")
