"""Seconds, bytes and FLOPs are written for people."""

from piper_ir.tools import enough_text, flops_text, size_text, time_text
from tests.helpers.cases import each_case


@each_case(
    ("value", "text"),
    [
        (0, "0 s"),
        (1.25, "1.25 s"),
        (0.01234, "12.34 ms"),
        (5e-6, "5 us"),
        (0.9999, "999.9 ms"),
        (-2e-3, "-2 ms"),
        (86400, "86400 s"),
        (6.9e-18, "0 s"),
        (-2.08e-15, "0 s"),
        (2e-9, "0.002 us"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert time_text(value) == text


@each_case(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 << 30, "5 GiB"),
        (-(3 << 20), "-3 MiB"),
        (20 << 40, "20480 GiB"),
    ],
)
def test_sizes(value: int, text: str) -> None:
    assert size_text(value) == text


@each_case(
    ("value", "text"),
    [
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1537, "1.501 KiB"),
        ((10 << 30) - 1, "10 GiB"),
        ((20 << 40) + 1, "20481 GiB"),
    ],
)
def test_a_size_that_is_to_be_enough_is_rounded_up(value: int, text: str) -> None:
    assert enough_text(value) == text


@each_case(
    ("value", "text"),
    [
        (0, "0 FLOP"),
        (999, "999 FLOP"),
        (98304, "98.3 kFLOP"),
        (1.5e12, "1.5 TFLOP"),
        (3e18, "3000 PFLOP"),
    ],
)
def test_flops(value: float, text: str) -> None:
    assert flops_text(value) == text
