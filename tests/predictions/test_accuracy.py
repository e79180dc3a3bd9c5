"""Published runs: rows are read, said in Piper, predicted and scored; a fit finds constants that it was not told."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import piper
from piper.cli import app
from piper.cli.actions.scoring import _doubtful
from piper.published import plans
from piper.published.convert import notes_on_fields, readings, row
from piper.published.plans import plan_of, stage_times
from piper.published.run_cluster import cluster_of
from piper.published.run_model import model_of
from piper.published.scoring import RunPrediction, kendall, percentile, predict, score
from piper.published.table import PublishedRow, read_row, read_rows, write_rows
from piper_ir.ground.errors import JobError
from piper_simulator import SOFTWARE
from tests.helpers.published_rows import TINY


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PublishedRow:
    monkeypatch.setenv("PIPER_CACHE", "")
    return read_row(TINY)


def test_open_fields_give_several_readings() -> None:
    open_ = read_row({**TINY, "micro_batch": "", "vocab": "", "kv_heads": ""})
    found = list(readings(open_))
    assert [r.micro_batch for r in found] == [1, 2, 4]
    assert all(r.vocab and r.kv_heads == 8 for r in found)
    with pytest.raises(JobError, match="micro_batch is open"):
        row(open_)


def test_open_chunks_divide_the_layers_or_these_with_both_ends() -> None:
    def open_row(layers: int, pp: int) -> PublishedRow:
        alone = {"tp": "1", "dp": "1", "gpus": str(pp), "pp": str(pp), "layers": str(layers)}
        return read_row({**TINY, **alone, "schedule": "interleaved", "vpp": ""})

    assert [r.vpp for r in readings(open_row(48, 8))] == [2, 3, 6]
    assert [r.vpp for r in readings(open_row(126, 16))] == [2, 4, 8]  # embedding and head are two
    assert [r.vpp for r in readings(open_row(5, 4))] == [2]
    assert any("vpp is open, and taken as 2" in n for n in notes_on_fields(open_row(5, 4)))


MIXTURE = {
    **TINY, "note": "latent attention", "tp": "1", "dp": "4", "ep": "2", "experts": "8", "top_k": "2",
    "expert_ffn": "256", "shared_experts": "2", "dense_layers": "1", "capacity": "1",
}  # fmt: skip


def test_a_mixture_is_said_with_its_experts() -> None:
    run = row(read_row(MIXTURE))
    assert dict(run.strategy.mesh.sizes) == {"dp": 2, "ep": 2}
    config, notes = model_of(run.row)
    assert config.experts is not None and config.latent is not None and not notes
    assert (config.experts.number, config.experts.shared_hidden) == (8, 512)
    assert (config.experts.capacity_factor, config.dense_layers) == (1, 1)
    ring = model_of(read_row({**MIXTURE, "cp": "2", "dp": "2", "capacity": "2"}))
    assert ring[0].experts is not None and ring[0].experts.capacity_factor is None
    assert "too few rows for a capacity of 2" in ring[1][0]
    again = {"tp": "2", "dp": "2", "seq_parallel": "no", "capacity": ""}
    assert "whole along tp" in model_of(read_row({**MIXTURE, **again}))[1][0]
    biased = model_of(read_row({**MIXTURE, "arch": "gpt", "note": ""}))[0]
    assert biased.experts is not None and biased.experts.bias and not biased.mlp_bias


@pytest.mark.long
def test_parameters_that_are_shared_are_gathered_by_layers_as_fsdp_wraps_blocks() -> None:
    """A unit of a mixture has no experts where devices share these, so that no gather has experts of two layers."""
    many = {"zero": "3", "layers": "3", "experts": "128", "capacity": "", "note": "torchtitan"}
    run = row(read_row({**MIXTURE, **many}))
    of_experts = [
        b for b in piper.compile(run.job, run.strategy).plan.buckets if b.shard.params == ("dp",)
    ]
    assert len({name.split(".")[1] for b in of_experts for name in b.params}) == 2
    assert all(len({name.split(".")[1] for name in b.params}) == 1 for b in of_experts)


def test_the_committed_mixtures_have_sources_and_can_be_said() -> None:
    rows = read_rows(Path(__file__).parents[2] / "benchmarks/published/mixtures.csv")
    assert len(rows) >= 20 and all(r.source and r.step_s and r.experts for r in rows)
    for one in rows:
        assert row(one).strategy.mesh.size("ep") == one.ep, one.case


@pytest.mark.long
def test_later_runs_of_a_fitted_stack_are_predicted_within_its_interval() -> None:
    """NeMo 24.12 ran what 24.09 did, to whose runs the stack is fitted; 175B has dropout in attention."""
    rows = read_rows(Path(__file__).parents[2] / "benchmarks/published/nemo_runs.csv")
    found = [predict(one, memory=False) for one in rows if one.pp == 1]
    assert len(found) == 6 and all(run.covered for run in found)
    assert all(abs(run.error or 1.0) < 0.04 for run in found)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("table", "cases"),
    [
        ("llm_foundry_h100.csv", "*-13b-2048-*"),
        ("nemo_2025.csv", "gb200-405b-256"),
        ("zero_bubble.csv", "*-6.2B-interleaved-m24"),
    ],
)
def test_runs_that_were_not_fitted_are_predicted_as_well(table: str, cases: str) -> None:
    rows = read_rows(Path(__file__).parents[2] / "benchmarks/published" / table, cases)
    others = [predict(one, memory=False) for one in rows if "used to fit" not in one.note]
    assert others and all(run.covered for run in others)


def test_megatron_cuts_experts_along_tp_and_has_larger_buckets_for_more_replicas() -> None:
    beside_tp = {"tp": "2", "dp": "2", "capacity": "", "note": "NeMo"}
    cut, whole = (
        row(read_row({**MIXTURE, **beside_tp, **more})).strategy
        for more in ({}, {"note": "NeMo; ETP 1"})
    )
    hidden = [[d.hidden for d in s.directives if getattr(d, "hidden", "")] for s in (cut, whole)]
    assert hidden == [["tp"], []]
    many = {"dp": "256", "gpus": "512", "global_batch": "512", "note": "Megatron-LM"}
    sizes = [row(read_row({**TINY, **more})).rest[-1].bucket_mb for more in ({}, many)]  # type: ignore[attr-defined]  # replicate
    assert sizes == [160.0, pytest.approx(4 * 256e6 / 2**20)]


def test_our_own_runs_are_as_they_were_measured_and_as_predicted() -> None:
    """Runs on an H100 and an H200 are compared. One row waits for its host, which was a fifth quicker on another day."""
    folder = Path(__file__).parents[2] / "benchmarks"
    rows = read_rows(folder / "published/own_runs.csv")
    for one in rows:
        printed = (folder.parent / one.source.partition(": ")[2]).read_text()
        assert one.step_s and f"measured {1e3 * one.step_s:.2f}" in printed, one.case
    found = {run.row.case: run for run in map(predict, rows)}
    errors = {case: abs(run.error or 0.0) for case, run in found.items()}
    outlier = errors.pop("h100-27nov-moe-4x1024")
    assert max(errors.values()) < 0.1 < outlier < 0.25
    peaks = [run.memory_error for run in found.values() if run.row.peak_gib]
    assert len(peaks) == 6 and all(p is not None and abs(p) < 1e-6 for p in peaks)


def test_a_prediction_has_an_interval_and_two_memories(tiny: PublishedRow) -> None:
    one = predict(tiny)
    assert one.refused == "" and one.stack == "blackwell-megatron"
    assert one.low < one.step_s < one.high and one.peak_gib < one.reserved_gib
    assert set(one.columns()) >= {
        "predicted_step_s", "low_step_s", "high_step_s", "predicted_peak_gib", "stack", "refused"
    }  # fmt: skip


def test_a_peak_has_the_unit_that_was_printed_and_fp16_has_gradients_of_16_bits() -> None:
    gib, gb = (read_row({**TINY, "note": note}) for note in ("", "memory as printed in GB"))
    assert predict(gb).peak_gib == pytest.approx(predict(gib).peak_gib * 2**30 / 10**9)
    reduced = [row(read_row({**TINY, "dtype": d})).job.precision for d in ("bf16", "fp16")]
    assert [p.reduce for p in reduced if p] == ["float32", "bfloat16"]


def test_a_kept_zero_bubble_plan_is_of_the_same_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its order follows from predicted times; other plans are the same under any."""
    pipe = {"pp": "2", "dp": "1", "note": "Zero Bubble", "hw": "a100-80g-sxm"}
    runs = [row(read_row({**TINY, **pipe, "schedule": s})) for s in ("1f1b", "zb1p")]
    names = []
    for source in "ab":
        monkeypatch.setattr(plans, "version", lambda sources, known=source: known)
        names.append([plans._name(run) for run in runs])
    assert [one == other for one, other in zip(*names, strict=True)] == [True, False]


def test_a_zero_bubble_order_is_of_the_whole_strategy(tiny: PublishedRow) -> None:
    """Its times are of the parts that devices have, and a recomputation belongs to I; transfers are between stages."""
    sizes: dict[str, Any] = {"hidden": 4096, "ffn": 16384, "heads": 32, "kv_heads": 32, "seq": 2048}
    plain = replace(tiny, schedule="zb1p", pp=2, tp=1, dp=2, layers=4, **sizes)
    cut, again = replace(plain, tp=2, dp=1, zero=0), replace(plain, recompute="full")
    times = [stage_times(one, None) for one in (plain, cut, again)]
    assert times[1]["F"][0] < times[0]["F"][0] == times[2]["F"][0]
    assert times[0]["I"][0] + 0.7 * times[0]["F"][0] < times[2]["I"][0]
    assert times[0]["hop"] == times[2]["hop"]
    assert times[0]["hop"] < times[0]["F"][0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "forward", "backward"), [("6.2B", 29.802, 29.428), ("28.3B", 10.408, 10.204)]
)
def test_zero_bubble_has_the_forward_and_backward_that_its_authors_profiled(
    model: str, forward: float, backward: float
) -> None:
    """F and I of a stage in the middle take these milliseconds (arXiv 2401.10241); orders follow from them."""
    table = Path(__file__).parents[2] / "benchmarks/published/zero_bubble.csv"
    (one, *_) = read_rows(table, f"*-{model}-zb2p-*")
    times = stage_times(one, SOFTWARE["ampere-zero-bubble"])
    assert times["F"][1] / times["I"][1] == pytest.approx(forward / backward, rel=0.03)


def test_own_bytes_stay_the_plans(tiny: PublishedRow) -> None:
    from piper_simulator import simulate

    run, plan = plan_of(tiny)
    plain = simulate(plan, cluster_of(tiny, ""))
    held = simulate(plan, run.cluster)
    assert plain.peak_bytes == held.peak_bytes == plain.held_bytes
    assert min(a - b for a, b in zip(held.held_bytes, held.peak_bytes, strict=True)) > 0


def test_an_activation_alone_is_made_again(tiny: PublishedRow) -> None:
    """Transformer Engine saves queries, keys and values behind their exchange, and the result on both sides of it."""
    _, plan = plan_of(replace(tiny, tp=1, cp=2, seq_parallel=False))
    layer = plan.variants[0].steps
    assert [kernel.op for kernel in layer["R"].cost.kernels] == ["silu"]
    assert layer["F"].collectives and not layer["R"].collectives


def test_selective_recomputation_is_of_attention_in_megatron_and_of_the_rest_in_torchtitan(
    tiny: PublishedRow,
) -> None:
    found = []
    for stack in ("hopper-nemo", "hopper-torch"):
        _, plan = plan_of(replace(tiny, recompute="selective", source="", stack=stack))
        found.append({kernel.op for kernel in plan.variants[0].steps["R"].cost.kernels})
    assert found[0] == {"attention"}
    assert "silu" in found[1] and "attention" not in found[1]


def test_scores() -> None:
    assert kendall([(1, 1), (2, 2), (3, 3)]) == 1 and kendall([(3, 1), (2, 2), (1, 3)]) == -1
    assert kendall([(1, 1), (2, 1.01)]) is None, "pairs that hardly differ do not count"
    assert percentile([0.0, 1.0], 0.9) == pytest.approx(0.9) and percentile([], 0.9) is None
    one = RunPrediction(read_row(TINY), (0.011,), 0.009, 0.012, 0.1, 0.105)
    found = score("x", [one])
    assert found.mean == pytest.approx(0.1) and found.coverage == 1 and found.memory_mean == 0


def test_the_command_writes_the_table_and_says_how_well(tiny: PublishedRow, tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(TINY))
        writer.writeheader()
        writer.writerows([TINY, {**TINY, "case": "b", "hw": "tpu"}])
    out = tmp_path / "out.csv"
    done = CliRunner().invoke(app, ["accuracy", str(table), "--out", str(out), "--at-most", "0.01"])
    assert done.exit_code == 1, "the step was made up"
    assert "no device 'tpu'" in done.output and "macro mean" in done.output
    assert "b: b: " not in done.output and "1 of 2 rows refused" in done.output
    none = ["accuracy", str(table), "--rows", "b", "--at-most", "9", "--json"]
    refused = CliRunner().invoke(app, none)
    assert refused.exit_code == 1 and json.loads(refused.stdout)["refused"] == 1
    scored = list(csv.DictReader(out.open()))
    assert float(scored[0]["predicted_step_s"]) > 0 and scored[1]["refused"]
    why = CliRunner().invoke(app, ["accuracy", str(table), "--why", "a"])
    assert (
        why.exit_code == 0 and "matmul" in why.output and "d log step / d log intra" in why.output
    )
    for flags, told in (
        ([], 0),
        (["--stack", "blackwell-megatron"], 0),
        (["--stack", "hopper-nemo"], 1),
    ):
        shown = CliRunner().invoke(app, ["accuracy", str(table), *flags])
        found = shown.output.count("not for b200-sxm, of 1 row, so that the interval is as wide")
        assert found == told and shown.exit_code == 0, (flags, shown.output)
        assert "1 row (a): predicted is a step that is more than 3 times away" in shown.output
    missing = CliRunner().invoke(app, ["accuracy", str(table), "--rows", "x*"])
    assert missing.exit_code == 2 and "no case fits" in missing.output
    assert [r.case for r in read_rows(table, "b")] == ["b"]


def test_what_was_predicted_before_an_interrupt_is_kept(
    tiny: PublishedRow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, out = tmp_path / "runs.csv", tmp_path / "out.csv"
    of_hopper = {**TINY, "stack": "hopper-nemo", "peak_gib": "", "step_s": ""}
    write_rows(table, [of_hopper, {**of_hopper, "case": "b", "hidden": "1024"}])

    def once(row: PublishedRow, **how: Any) -> RunPrediction:
        if row.case == "b":
            raise KeyboardInterrupt
        return predict(row, **how)

    monkeypatch.setattr("piper.cli.actions.scoring.predict", once)
    done = CliRunner().invoke(app, ["accuracy", str(table), "--out", str(out)])
    assert done.exit_code == 130 and "interrupted behind 1 of 2 rows" in done.output
    assert "hopper-nemo hold for" in done.output, "a stack that a row names is judged, too"
    assert [row["case"] for row in csv.DictReader(out.open())] == ["a"]


def test_a_run_that_was_measured_fits(tiny: PublishedRow) -> None:
    """Its allocator has reserved no more than there was; one that was not measured would have to reserve too much."""
    measured = replace(tiny, hidden=16384, layers=200, seq=4096, step_s=1.0)
    device = cluster_of(measured).device
    full = RunPrediction(measured, (1.0,), 0.9, 1.1, peak_gib=170.0, reserved_gib=200.0)
    assert not _doubtful([(full, device)])
    for planned in (replace(full, row=replace(measured, step_s=None)), replace(full, peak_gib=1e3)):
        [said] = _doubtful([(planned, device)])
        assert "1 row (a): predicted is more memory than the device has" in said
