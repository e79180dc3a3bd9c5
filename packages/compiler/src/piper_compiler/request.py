"""Hold the arguments of a compilation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast, get_args

from piper_compiler.strategy import Strategy
from piper_ir.ground.errors import CompileError
from piper_ir.plan.plan import Bucket, DeviceType
from piper_ir.program.costs import Costs
from piper_ir.program.ops import KernelSource, Step
from piper_ir.program.program import Param, Program


@dataclass(frozen=True)
class Training:
    """Describe the job, as far as the compiler needs it.

    Attributes:
        group_of: parameter -> index of the optimizer's parameter group (default 0).
        state_bytes: bytes of optimizer state that a holder of a bucket keeps.
        clip: bound of the global gradient norm; None for no clipping.
        tokens_per_row: tokens in a row of the batch, for figures per token.
        update_bytes: bytes of temporaries that the optimizer holds in an update of a rank's shards of some buckets.
        whole: the name of an optimizer that works on whole parameters, whose states ranks cannot share; else "".
        whole_groups: the groups of such optimizers, whose parameters are updated one by one.
        matrix_groups: the groups among these that update each matrix [..., rows, columns] by itself.
        averages: buffers that forward updates from the batch and reads for nothing else, so that the buffers of replica
            0 count; None if the job has not chosen that replicas may differ.
        params: the dtype of parameters in the update; "" for their dtype in forward and backward.
        reduce: the dtype in which gradients are reduced over ranks; "" for the dtype of the update.
        accumulate: the dtype in which a rank sums gradients over microbatches; "" for that of reductions.
        scaled: whether the loss is scaled, so that a step is skipped if the norm of the gradient is not finite.
        undivided: why a step may have one microbatch on one replica only; "" if it may have any number.
        drawn_by_row: whether random numbers are drawn by row, and not by torch's generator.
        newton_schulz: by group, the iterations by which its optimizer makes matrices orthogonal, where it does.
    """

    group_of: Mapping[str, int] = field(default_factory=dict)
    state_bytes: Callable[[Bucket], int] = lambda bucket: 0
    clip: float | None = None
    tokens_per_row: int | None = None
    update_bytes: Callable[[Sequence[Bucket]], int] = lambda buckets: 0
    whole: str = ""
    whole_groups: frozenset[int] = frozenset()
    matrix_groups: frozenset[int] = frozenset()
    params: str = ""
    reduce: str = ""
    averages: frozenset[str] | None = None
    undivided: str = ""
    scaled: bool = False
    accumulate: str = ""
    drawn_by_row: bool = True
    newton_schulz: Mapping[int, int] = field(default_factory=dict)

    @property
    def normed(self) -> bool:
        """Return whether an update reads the norm of the gradient."""
        return self.scaled or self.clip is not None

    def bucket_dtypes(self, param: Param, reduced: bool) -> tuple[str, str, str, str]:
        """Return the dtypes of a parameter's bucket: of the update, of forward and backward, of reductions and of sums.

        The second and the third are "" if they equal the first, and the last is "" if it equals that of reductions. A
        bucket that is not `reduced` over ranks has sums alone.
        """
        updated = self.params or param.spec.dtype
        reduce = self.reduce or updated
        summed = self.accumulate or reduce
        reduce = reduce if reduced else summed
        return (
            updated,
            param.spec.dtype if param.spec.dtype != updated else "",
            reduce if reduce != updated else "",
            summed if summed != reduce else "",
        )


@dataclass(frozen=True)
class Options:
    """Choose how a plan is laid out; no option changes its results, except that `kernels` rounds them differently.

    Attributes:
        fuse: join neighbours into one instruction.
        recv_ahead: how many compute instructions before its first reader a receive is posted.
        device: the kind of device that peaks of memory are for; the program is the same for all.
        kernels: "eager" runs each operation by torch; "inductor" compiles groups of pointwise operations, reductions,
            norms and losses. The plan has the memory and the kernels of the compiled groups, and layers that no
            `recompute` selects keep the results of products for a backward that is one graph.
        cuda_graph: a rank captures its step up to the update as one CUDA graph, and launches that in later steps.

    Raises CompileError for other values.
    """

    fuse: bool = True
    recv_ahead: int = 2
    device: DeviceType = ""
    kernels: KernelSource = "eager"
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        kernel_source(self.kernels)
        for name in ("fuse", "cuda_graph"):
            if type(value := getattr(self, name)) is not bool:
                raise CompileError(f"Options({name}={value!r}): True or False is accepted")
        if type(self.recv_ahead) is not int or self.recv_ahead < 0:
            raise CompileError(
                f"Options(recv_ahead={self.recv_ahead!r}): an integer of at least 0 is needed"
            )
        if self.device not in get_args(DeviceType):
            raise CompileError(f"Options(device={self.device!r}): 'cpu', 'cuda' or '' is accepted")


def kernel_source(name: str) -> KernelSource:
    """Return the source of kernels with a name; raise CompileError if there is none."""
    if name not in get_args(KernelSource):
        accepted = " and ".join(map(repr, get_args(KernelSource)))
        raise CompileError(f"Options(kernels={name!r}): {accepted} are accepted")
    return cast(KernelSource, name)


ProgramAt = Callable[[int, Mapping[str, Collection[Step]]], Program]
"""The program for a number of rows, for a graph that runs these steps of chunks in compiled groups, by variant."""


@dataclass(frozen=True)
class CompileRequest:
    """Hold a program, a strategy, and everything else that decides the plan.

    Attributes:
        program: the captured or synthetic program.
        global_batch: rows of one step over all replicas (default: that of the strategy, or else one row
            per microbatch and replica).
        training: the job, as far as the compiler needs it.
        costs: known durations.
        options: how the plan is laid out.
        at_rows: the program for a number of rows, for programs that are not affine down to one row.
        evaluates: whether the plan is one of an evaluation: forwards alone.
        keyed: whether the plan names its program by the hash of its content; a plan that is only timed needs no name.
    """

    program: Program
    strategy: Strategy
    global_batch: int | None = None
    training: Training = Training()
    costs: Costs | None = None
    options: Options = Options()
    at_rows: ProgramAt | None = None
    evaluates: bool = False
    keyed: bool = True
