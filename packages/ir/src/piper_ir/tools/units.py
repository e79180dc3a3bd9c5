"""Write seconds, bytes and FLOPs as people read them."""

from __future__ import annotations

from math import ceil

DIGITS = 4
_SIZES = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_FLOPS = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def time_text(seconds: float) -> str:
    """Return seconds with four digits and a unit that suits them: "1.25 s", "12.34 ms", "5 us".

    Less than a picosecond comes from rounding, and is written as "0 s".
    """
    if abs(seconds) < 1e-12:
        return "0 s"
    if abs(seconds) >= 1:
        return f"{_digits(seconds)} s"
    return (
        f"{_digits(seconds * 1e3)} ms" if abs(seconds) >= 1e-3 else f"{_digits(seconds * 1e6)} us"
    )


def size_text(nbytes: float) -> str:
    """Return bytes with four digits and a binary unit: "1.5 GiB", "12 B"."""
    for unit, scale in _SIZES:
        if abs(nbytes) >= scale:
            return f"{_digits(nbytes / scale)} {unit}"
    return f"{nbytes:.0f} B"


def enough_text(nbytes: int) -> str:
    """Return a size as `size_text` writes it, rounded up, so that a limit of this size is enough: "1.5 GiB"."""
    for unit, scale in _SIZES:
        if nbytes >= scale:
            step = 10 ** max(0, DIGITS - len(str(nbytes // scale)))
            return f"{_digits(ceil(nbytes * step / scale) / step)} {unit}"
    return f"{nbytes} B"


def count_text(number: int, noun: str, several: str = "") -> str:
    """Write a number of things with the noun in its number: "1 row", "1,000 rows"; `several` is an irregular plural."""
    return f"{number:,} {noun if number == 1 else several or f'{noun}s'}"


def flops_text(flops: float) -> str:
    """Return FLOPs with four digits and a decimal unit: "1.5 TFLOP", "12 FLOP"."""
    for unit, scale in _FLOPS:
        if abs(flops) >= scale:
            return f"{_digits(flops / scale)} {unit}FLOP"
    return f"{flops:.0f} FLOP"


def _digits(value: float) -> str:
    return f"{value:.{DIGITS}g}" if abs(value) < 10**DIGITS else f"{value:.0f}"
