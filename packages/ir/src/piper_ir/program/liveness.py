"""Describe the memory that a step's code holds beyond its inputs while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from piper_ir.ground.errors import PlanError
from piper_ir.ground.sizes import Dim, bind


@dataclass(frozen=True, slots=True)
class Inside:
    """Say how much memory is held while one op runs whose kernel allocates memory of its own on a CUDA device.

    That is `held` + min(`own`, `most`) bytes: a kernel that works in slices holds no more than a slice.

    Attributes:
        held: bytes that the step's code holds while the op runs.
        own: bytes of the kernel's own memory without slices.
        most: bytes of a slice.
    """

    held: Dim
    own: Dim = 0
    most: int = 0

    def bytes(self, rows: int) -> int:
        """Return the bytes at a number of rows."""
        return bind(self.held, rows) + min(bind(self.own, rows), self.most)


@dataclass(frozen=True, slots=True)
class Liveness:
    """Say how many bytes a step's code holds beyond its inputs while it runs: temporaries plus the outputs made so far.

    An input that dies in this step is freed right after its last use, so segment i runs without the dying inputs among
    consumed[:i].

    Attributes:
        consumed: indexes into Signature.reads in the order of their last use.
        segments: segments[i] covers the code up to and including the last use of consumed[i], the final one the rest.
            It holds the sizes whose maximum is the most bytes held there (several, since a maximum of affine functions
            is not affine).
        inside: the same segments, with the ops whose kernels hold memory of their own on a CUDA device; empty if no
            kernel does.
        on_cpu: the same segments, with the ops that a CPU computes written out, or with float32 copies, and a CUDA
            device by a kernel alone; empty if there are none.
    """

    consumed: tuple[int, ...] = ()
    segments: tuple[tuple[Dim, ...], ...] = ((),)
    inside: tuple[tuple[Inside, ...], ...] = ()
    on_cpu: tuple[tuple[Dim, ...], ...] = ()

    def bind(self, rows: int) -> Liveness:
        """Return the bytes at a number of rows."""
        segments, on_cpu = (
            tuple((max((bind(d, rows) for d in s), default=0),) for s in all_of)
            for all_of in (self.segments, self.on_cpu)
        )
        inside = tuple((Inside(max(i.bytes(rows) for i in s)),) if s else () for s in self.inside)
        return Liveness(self.consumed, segments, inside, on_cpu)

    def peak(self, dying: Mapping[int, int], device: str = "") -> int:
        """Return the most bytes above those held before the step; sizes must be bound.

        `dying` maps indexes into reads to bytes, for the inputs that die here. The workspace of kernels
        is that of a CUDA device if `device` is "cuda", else that of a CPU. Raises PlanError if entries are missing, as
        in a file that was edited.
        """
        if len(self.segments) != len(self.consumed) + 1 or len(self.inside) not in (
            0,
            len(self.segments),
        ):
            raise PlanError(
                f"a step's liveness has {len(self.segments)} segments and {len(self.inside)} entries of inside, "
                f"and {len(self.consumed)} inputs consumed; one segment more than these is needed, and inside for "
                f"each or for none. Compile the plan again, or restore its file"
            )
        freed = 0
        peak = 0
        for i, segment in enumerate(self.segments):
            most_held = max([bind(d, 0) for d in segment], default=0)
            if device == "cuda" and self.inside:
                most_held = max((most_held, *(k.bytes(0) for k in self.inside[i])))
            elif device != "cuda" and self.on_cpu:
                most_held = max((most_held, *(bind(d, 0) for d in self.on_cpu[i])))
            peak = max(peak, most_held - freed)
            if i < len(self.consumed):
                freed += dying.get(self.consumed[i], 0)
        return peak
