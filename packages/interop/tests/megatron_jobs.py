"""Read and describe small jobs of Megatron-LM from texts of options."""

from __future__ import annotations

from pathlib import Path

from piper_interop import Asked, Imported, JobDescription, import_job
from piper_interop.neutral.system import System

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
