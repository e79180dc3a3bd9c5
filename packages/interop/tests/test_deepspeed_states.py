"""DeepSpeed's defaults for the states that ranks share: dtypes and places of sums, buffers, and their notes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from packages.interop.tests.jobs import imported
from piper_interop import export_job
from piper_ir.ground.errors import JobError
from tests.helpers.cases import each_case


def test_without_zero_gradients_are_summed_in_the_dtype_of_the_model(tmp_path: Path) -> None:
    half = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    wide = half | {"data_types": {"grad_accum_dtype": "fp32"}}
    with pytest.raises(JobError, match="without ZeRO DeepSpeed refuses gradients in float32"):
        imported("deepspeed", tmp_path, wide)
    described = imported("deepspeed", tmp_path, half)
    exported = export_job("deepspeed", replace(described, reduce="float32"))
    assert "without ZeRO DeepSpeed sums gradients in bfloat16" in exported.notes
    assert '"grad_accum_dtype": "bf16"' in exported.files["ds_config.json"]


def test_ranks_of_a_row_reduce_in_a_dtype_of_their_own(tmp_path: Path) -> None:
    plain = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    assert imported("deepspeed", tmp_path, plain).reduce == "bfloat16"
    rows = plain | {"sequence_parallel_size": 2}
    assert imported("deepspeed", tmp_path, rows).reduce == "float32"
    said = rows | {"seq_parallel_communication_data_type": "bf16"}
    assert imported("deepspeed", tmp_path, said).reduce == "bfloat16"


@each_case(
    ("zero", "said"),
    [
        ({"stage": 2}, ("all-reduces", "too little memory by 4 bytes of each part")),
        ({"stage": 1, "use_multi_rank_bucket_allreduce": False}, ("too little memory by 4 bytes",)),
        ({"stage": 3}, ("too little memory by 1,717 MiB",)),
        ({"stage": 3, "contiguous_gradients": False}, ()),
    ],
)
def test_what_deepspeed_does_with_states_by_its_defaults(
    tmp_path: Path, zero: dict[str, Any], said: tuple[str, ...]
) -> None:
    options = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    notes = imported("deepspeed", tmp_path, options).notes
    found = [note for note in notes if not ("checkpoints" in note or "max_reuse" in note)]
    assert len(found) == len(said)
    assert all(text in note for text, note in zip(said, found, strict=True))


def test_without_zero_gradients_are_reduced_behind_the_backward(tmp_path: Path) -> None:
    plain = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"overlap_comm": True}}
    described = imported("deepspeed", tmp_path, plain)
    layout = described.layout
    assert (layout.zero, layout.overlap, layout.bucket_mb) == (0, False, 5e8 * 4 / 2**20)
    overlapped = replace(described, layout=replace(layout, overlap=True))
    assert "behind the backward" in "".join(export_job("deepspeed", overlapped).notes)
    assert "behind the backward" not in "".join(export_job("deepspeed", described).notes)
