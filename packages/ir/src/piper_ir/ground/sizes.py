"""Describe sizes that are affine in the rows of a microbatch, and tensors of such sizes."""

from __future__ import annotations

from dataclasses import dataclass

from piper_ir.ground.errors import CaptureError, FormatError

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""The bytes of one element, by torch's name of the dtype."""


@dataclass(frozen=True, slots=True)
class Affine:
    """Stand for `a + b * rows`, where rows is the row count of one microbatch on one device; b is never 0."""

    a: int
    b: int

    def __add__(self, other: Dim) -> Dim:
        if isinstance(other, Affine):
            return affine(self.a + other.a, self.b + other.b)
        return Affine(self.a + other, self.b)

    __radd__ = __add__

    def __mul__(self, other: Dim) -> Dim:
        if isinstance(other, Affine):
            raise CaptureError(
                f"({self}) * ({other}) is quadratic in the rows of a microbatch; sizes must be affine"
            )
        return affine(self.a * other, self.b * other)

    __rmul__ = __mul__

    def __str__(self) -> str:
        return f"{self.a}+{self.b}r" if self.a else f"{self.b}r"


Dim = int | Affine
"""A size: a plain integer, or affine in rows. In a Plan every Dim is an int."""


def affine(a: int, b: int) -> Dim:
    """Return the size `a + b * rows`, as an int when it does not depend on rows."""
    return Affine(a, b) if b else a


def bind(size: Dim, rows: int) -> int:
    """Return the size at a given number of rows."""
    return size.a + size.b * rows if isinstance(size, Affine) else size


def fit(at2: int, at3: int) -> Dim:
    """Return the affine size that is `at2` at two rows and `at3` at three."""
    return affine(3 * at2 - 2 * at3, at3 - at2)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Describe a contiguous tensor; `dtype` is torch's name without `torch.`."""

    shape: tuple[Dim, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise FormatError(f"unknown dtype {self.dtype!r}; known are {', '.join(ITEM_BYTES)}")

    @property
    def numel(self) -> Dim:
        """Return the number of elements."""
        product: Dim = 1
        for size in self.shape:
            product = product * size
        return product

    @property
    def nbytes(self) -> Dim:
        """Return the number of bytes."""
        return self.numel * ITEM_BYTES[self.dtype]

    def bind(self, rows: int) -> TensorSpec:
        """Return the tensor at a number of rows."""
        return TensorSpec(tuple(bind(d, rows) for d in self.shape), self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"
