"""Make schedules with one stage per device (GPipe, 1F1B, the default order), data and tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from piper_compiler.directives import (
    Boundaries,
    Directive,
    order,
    partition,
    place,
    recompute,
    replicate,
    shard,
    split,
)
from piper_compiler.directives.shard import Activations, AttentionExchange, Overflow, TokenOrder
from piper_compiler.recipes.registry import recipe, sized
from piper_compiler.recipes.stages import check_numbers
from piper_ir.ground.errors import DirectiveError
from piper_ir.ground.select import ANY, Where, where
from piper_ir.program.ops import KEEP_ALL


@recipe(
    source="Huang et al. 2019, arXiv 1811.06965",
    formula="makespan (m + p - 1)(F + B)",
    peak="m",
    use="the simplest; each stage's parameters are used once per phase",
    rule="any pp, microbatches >= 1",
)
def gpipe(*, pp: int, microbatches: int, at: Boundaries = "even") -> tuple[Directive, ...]:
    """Run all forwards, then all backwards, one stage per device; any pp and microbatches.

    Source: Huang et al. 2019, arXiv 1811.06965. Makespan (m + p - 1)(F + B); peak on every device: m activations.
    """
    check_numbers("gpipe", pp=pp, microbatches=microbatches)
    orders = [
        [*(("F", i) for i in range(microbatches)), *(("B", i) for i in range(microbatches))]
    ] * pp
    return (*pipeline(pp=pp, microbatches=microbatches, at=at), *stage_orders(orders))


@recipe(
    source="Narayanan et al. 2019 (PipeDream), the flushing variant of arXiv 2006.09503",
    formula="makespan (m + p - 1)(F + B)",
    peak="min(m, p - r)",
    use="the default: the bubble of GPipe, memory that does not grow with the microbatches",
    rule="any pp, microbatches >= 1",
)
def one_f_one_b(*, pp: int, microbatches: int, at: Boundaries = "even") -> tuple[Directive, ...]:
    """Alternate one forward and one backward after a warm-up of p - r - 1 forwards on device r.

    Source: Narayanan et al. 2019 (PipeDream), the flushing variant of arXiv 2006.09503. Makespan (m + p - 1)(F + B);
    peak on device r: min(m, p - r) activations. Any pp and microbatches.
    """
    check_numbers("one_f_one_b", pp=pp, microbatches=microbatches)
    orders = []
    for r in range(pp):
        warm = min(pp - r - 1, microbatches)
        steps = [("F", i) for i in range(warm)]
        for i in range(warm, microbatches):
            steps += [("F", i), ("B", i - warm)]
        steps += [("B", i) for i in range(microbatches - warm, microbatches)]
        orders.append(steps)
    return (*pipeline(pp=pp, microbatches=microbatches, at=at), *stage_orders(orders))


@sized
def pipeline(*, pp: int, microbatches: int, at: Boundaries = "even") -> tuple[Directive, ...]:
    """Partition into pp stages, split, and place stage r on device r, in the default order."""
    check_numbers("pipeline", pp=pp, microbatches=microbatches)
    places = (place(where(stage=r), on=dict(pp=r)) for r in range(pp))
    return (partition(stages=pp, at=at), split(where(), microbatches=microbatches), *places)


def data_parallel(
    *, over: str | tuple[str, ...] = ("dp",), zero: Literal[0, 1, 2, 3] = 0, bucket_mb: float = 25, reduce: str = "",
    shard: Mapping[str, str | tuple[str, ...]] | None = None, resident_mb: float | str = 0, reduced_mb: float | str = 0,
    prefetch: int = 1, gather: str = "", whole_mb: float = 0, overlap: bool = True,
) -> tuple[Directive, ...]:  # fmt: skip
    """Replicate the whole model over mesh axes, with gradients summed in buckets; see `replicate` for the arguments.

    It composes with a pipeline recipe written before it.
    """
    return (
        replicate(
            where(),
            over,
            zero,
            bucket_mb,
            reduce,
            shard,
            resident_mb,
            reduced_mb,
            prefetch,
            gather,
            whole_mb,
            overlap,
        ),
    )


def recomputation(*, keep: Sequence[str], group: int = 1) -> tuple[Directive, ...]:
    """Put stage k under the policy `keep[k]`, by one `recompute` per policy; see there for the arguments.

    It composes with a pipeline recipe written before it.
    """
    if isinstance(keep, str):
        raise DirectiveError(
            f"recomputation(keep={keep!r}): a policy for each stage is needed, such as keep=[{keep!r}] * 4"
        )
    stages_by_policy: dict[str, list[int]] = {}
    for stage, policy in enumerate(keep):
        stages_by_policy.setdefault(policy, []).append(stage)
    return tuple(
        recompute(
            where(stage=tuple(stages) if len(stages) > 1 else stages[0]),
            keep=policy,
            group=1 if policy == KEEP_ALL else group,
        )
        for policy, stages in stages_by_policy.items()
    )


def tensor_parallel(
    *, sequence: bool = False, cut: bool = False, pieces: int = 1
) -> tuple[Directive, ...]:
    """Let the devices along the mesh axis tp share the work of every chunk; see `shard`.

    With `sequence` activations between layers are sharded along their tokens, too, and products in several `pieces` run
    beside the messages of other pieces. With `cut` the all-reduces stand between chunks, so that compute of another
    microbatch can hide them. It composes with the recipes written after it.
    """
    if type(sequence) is not bool:
        raise DirectiveError(f"tensor_parallel(sequence={sequence!r}): True or False is accepted")
    stream: Activations = "tokens" if sequence else ""
    return (shard(where(), over="tp", stream=stream, cut=cut, pieces=pieces),)


def context_parallel(
    *, attention: AttentionExchange = "heads", order: TokenOrder = ""
) -> tuple[Directive, ...]:
    """Let the devices along the mesh axis cp compute their tokens of every op; see `shard`.

    Attention is computed by exchanging tokens for heads, in a "ring", or with keys that each device has to "gather";
    `order` says which tokens a device has. It composes with `tensor_parallel`, written before it, and with the
    recipes written after it.
    """
    return (shard(where(), over="cp", index="tokens", attention=attention, order=order),)


def expert_parallel(
    *,
    over: str | tuple[str, ...] = "ep",
    channel: str = "",
    sms: int | None = None,
    bound: float = 1.25,
    overflow: Overflow = "rounds",
    hidden: str | tuple[str, ...] = "",
    beside: bool = False,
) -> tuple[Directive, ...]:
    """Let the devices along a mesh axis share the experts of a mixture, and have rows of their own elsewhere.

    Experts are the operations of regions with the coordinate `experts`; tokens go to them and back on the stream
    `channel` (see `shard`). Beside it stands `data_parallel(over=("dp", over))`, or `replicate` with such axes: all but
    the experts is replicated along both. `over` is a factor of the replicas, so dp may be 1. Dropless experts also take
    `over=("tp", "ep")` beside `tensor_parallel(sequence=True)`, or cp: then the devices along all of these share the
    experts, and `data_parallel` names ep alone, as tokens are shared along the others. It is written before the recipes
    of pipelines, and composes with `tensor_parallel`. Along `hidden`, other axes of these kinds, devices also cut each
    dropless expert (expert tensor parallelism): "tp" beside `tensor_parallel(sequence=True)`, or "etp", which
    `data_parallel` names. With `beside` the rows of dropless experts travel while a device computes the other
    operations of their region, such as a shared expert. `bound` and `overflow` are for dropless mixtures, `channel` and
    `sms` for mixtures with a capacity.
    """
    asked = shard(
        where(experts=ANY),
        over=over,
        index="experts",
        stream="rows",
        channel=channel,
        sms=sms,
        bound=bound,
        overflow=overflow,
        hidden=hidden,
        beside=beside,
    )
    return (asked,)


def stage_orders(orders: Iterable[list[tuple[str, int]]]) -> tuple[Directive, ...]:
    """Return one `order` per stage from its list of (phase, microbatch); a single entry needs none."""
    directives: list[Directive] = []
    for stage, steps in enumerate(orders):
        selections: list[Where] = [where(stage=stage, phase=phase, mb=mb) for phase, mb in steps]
        if len(selections) > 1:
            directives.append(order(*selections, missing="skip"))  # frozen stages have no backward
    return tuple(directives)
