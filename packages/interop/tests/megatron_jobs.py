"""Read and describe small jobs of Megatron-LM from texts of options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from piper_interop import Asked, DeviceLayout, Imported, JobDescription, ModelSizes, import_job
from piper_interop.megatron.describe import PP_FIRST, WHOLE_MB
from piper_interop.neutral.system import System
from piper_interop.neutral.units import unit_mb
from piper_ir.ground.sizes import ITEM_BYTES

DENSE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 64 --vocab-size 1000 --bf16 --lr 1e-4 --swiglu --disable-bias-linear "
    "--position-embedding-type rope --normalization RMSNorm --hidden-dropout 0 --attention-dropout 0"
)
"""A decoder of eight layers, to which a test adds what it is about; a later option stands for an earlier one."""

MIXTURE = f"{DENSE} --num-experts 8 --moe-ffn-hidden-size 48 --moe-token-dispatcher-type alltoall"


def imported(options: str, devices: int | None = 8, *stand_ins: str) -> Imported:
    """Return the import of a text of options."""
    return import_job("megatron", options, Asked(devices=devices, stand_ins=frozenset(stand_ins)))


def described(
    more: str = "", devices: int | None = 8, *stand_ins: str, base: str = DENSE
) -> JobDescription:
    """Return the description of a base with more options."""
    return imported(f"{base} {more}", devices, *stand_ins).described


def of_file(
    path: Path, text: str, devices: int | None = None, sets: tuple[str, ...] = ()
) -> Imported:
    """Write a file and return its import."""
    path.write_text(text, encoding="utf-8")
    return import_job("megatron", str(path), Asked(devices=devices, sets=sets))


def megatron() -> System:
    """Return the system."""
    from piper_interop import system

    return system("megatron")


ALONE: dict[str, Any] = {"bucket_mb": WHOLE_MB, "overlap": False}
"""One bucket of all gradients, reduced behind the backward: Megatron's default."""
LAYOUTS = (
    DeviceLayout(tp=2, sequence=True, dp=4, zero=1, bucket_mb=152.587890625),
    DeviceLayout(tp=2, cp=2, attention="gather", dp=2, zero=1, over_cp=True, **ALONE),
    DeviceLayout(cp=2, attention="heads", dp=4, bucket_mb=2.0),
    DeviceLayout(pp=4, dp=2, **ALONE),
    DeviceLayout(pp=4, schedule="interleaved", chunks=2, group=6, dp=2, zero=1, bucket_mb=2.0),
    DeviceLayout(pp=4, dp=2, at=(1, 4, 6), **ALONE),
    DeviceLayout(pp=3, dp=2, **ALONE),
    DeviceLayout(pp=2, dp=2, order=PP_FIRST, **ALONE),
    DeviceLayout(pp=2, dp=2, schedule="interleaved", chunks=2, at=(1, 6, 9), units="all", **ALONE),
    DeviceLayout(dp=4, dp_replicate=2, zero=1, **ALONE),
    DeviceLayout(dp=8, zero=2),
    DeviceLayout(dp=8, zero=3),
)
"""Layouts that Megatron can say, for a decoder of eight layers."""


def job_with(layout: DeviceLayout, **changes: Any) -> JobDescription:
    """Return the decoder of eight layers under a layout; rows of a step are twelve microbatches of each replica."""
    job = described()
    rows = 12 * job.rows * layout.replicas
    fields = dict(job.sizes.fields) | {"vocab": 1024}
    if layout.zero >= 2 and layout.replicas * layout.cp > 1:  # FSDP's buckets
        width = ITEM_BYTES[changes.get("reduce", job.reduce)]
        layout = replace(layout, bucket_mb=unit_mb(ModelSizes(fields), layout.tp, layout.ep, width))
    return replace(
        job,
        name="megatron",
        sizes=ModelSizes(fields),
        global_batch=rows,
        layout=layout,
        notes=(),
        **changes,
    )
