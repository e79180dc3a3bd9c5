"""Name the dtypes of the states of a bucket."""

from __future__ import annotations

from piper_ir.ground.sizes import ITEM_BYTES


class BucketDtypes:
    """Name the dtypes of a bucket's states: that of the update, and others that are "" if they equal another.

    `compute` and `reduce` are "" if they equal `dtype`, and `accumulate` is "" if it equals the dtype of reductions.

    `host` says whether the optimizer and its states are on the host, and `away` whether its parameters are, too.
    """

    __slots__ = ()
    dtype: str
    compute: str
    reduce: str
    accumulate: str
    host: bool
    away: bool

    @property
    def compute_dtype(self) -> str:
        """Return the dtype of its parameters in forward and backward."""
        return self.compute or self.dtype

    @property
    def reduce_dtype(self) -> str:
        """Return the dtype in which its gradients are reduced over ranks."""
        return self.reduce or self.dtype

    @property
    def accumulate_dtype(self) -> str:
        """Return the dtype in which a rank sums its gradients over microbatches."""
        return self.accumulate or self.reduce_dtype

    @property
    def casts(self) -> bool:
        """Return whether its gradients are cast before they are reduced over ranks, and cast back behind that."""
        return self.accumulate_dtype != self.reduce_dtype

    @property
    def mastered(self) -> bool:
        """Return whether its holders have a master beside the parameters that chunks read."""
        return self.host != self.away or self.compute_dtype != self.dtype

    def on_host(self, category: str) -> bool:
        """Return whether its state of a category is in the memory of the host."""
        return self.away if category == "param" else self.host and category in ("master", "optim")

    def dtype_of(self, category: str) -> str:
        """Return the dtype of a state of a category, or of a value that stands for one."""
        match category:
            case "param" | "gathered":
                return self.compute_dtype
            case "grad":
                return self.accumulate_dtype
            case "reduced":
                return self.reduce_dtype
            case _:
                return self.dtype

    @property
    def narrowest(self) -> int:
        """Return the fewest bytes of an element in any of its dtypes."""
        return min(ITEM_BYTES[dtype] for dtype in self.every_dtype)

    @property
    def every_dtype(self) -> tuple[str, ...]:
        """Return all of them."""
        return self.dtype, self.compute_dtype, self.reduce_dtype, self.accumulate_dtype
