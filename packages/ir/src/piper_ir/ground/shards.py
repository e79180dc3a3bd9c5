"""Say which states of a bucket ranks share, each keeping a part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

SharedState = Literal["param", "master", "grad", "optim"]
"""The states of a bucket, as categories of memory."""


@dataclass(frozen=True, slots=True)
class Shards:
    """Name the mesh axes along which ranks share a bucket's states: each keeps an equal part, in the order of ranks.

    The parameters' axes are a subset of the gradients' axes, these of the axes of the optimizer's states, and all of
    the axes along which the bucket is replicated. No axes mean that each rank keeps all of a state.
    """

    params: tuple[str, ...] = ()
    grads: tuple[str, ...] = ()
    optim: tuple[str, ...] = ()

    def of(self, category: SharedState) -> tuple[str, ...]:
        """Return the axes along which a state of a category is shared."""
        match category:
            case "param":
                return self.params
            case "grad":
                return self.grads
            case "optim" | "master":
                return self.optim
            case _:
                assert_never(category)


UNSHARDED = Shards()
"""The shards of a bucket that each rank keeps whole."""
