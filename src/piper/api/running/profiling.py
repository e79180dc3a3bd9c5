"""Measure durations of a job's chunks, messages and instructions on this machine, to predict any strategy."""

from __future__ import annotations

import pickle
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING

from piper.api.captures.capturing import captured_once
from piper.api.compiling.compiling import Compiled, compile, trained_job
from piper_compiler import Directive, Options, Strategy, eager, recipes, recompute, shard
from piper_ir.ground.errors import ExecutionError, JobError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.ground.sizes import bind
from piper_ir.plan.plan import Plan
from piper_ir.plan.plan_bytes import PlanBytes, bucket_bytes
from piper_ir.program.costs import (
    AllocatorCosts,
    CommDuration,
    Costs,
    Duration,
    HostCosts,
    Origin,
    PartDuration,
    StepDuration,
)
from piper_ir.program.ops import COMM, HANDS_ON, KEEP_ALL, Compute, KernelSource
from piper_ir.program.program import Chunk
from piper_ir.tools import machine_name
from piper_simulator import CPU, product_cluster

if TYPE_CHECKING:
    from piper_runtime import Job
    from piper_runtime.launch import Launcher, Workers
    from piper_runtime.profile import MessageSample, ProfileReport, ProfileRequest

REPEATS = 7
TIMEOUT_S = 120.0
FEWEST_OF_BATCH, MOST_OF_BATCH = 32, 2
"""The bounds of measured microbatches, from 1 / 32 to 1 / 2 of the global batch: 2 to 32 in a step, over all replicas.

The costs reach a factor of 2 further.
"""
APART = 1.9
"""The least factor between neighbouring numbers of rows; durations in between are interpolated."""
SMALLEST_MESSAGE, GRID = 4, 4
"""The bytes of the smallest message, and the factor between sizes."""
SHARING = (2, 8)
"""The numbers of ranks that share states in the plans whose ops on buckets are measured; others are interpolated."""


@captured_once()
def profile(
    job: Job,
    strategy: Strategy,
    *,
    launcher: Launcher = "processes",
    cluster: str = "auto",
    rows: Sequence[int] | None = None,
    keep: Sequence[str] = (),
    repeats: int = REPEATS,
    timeout_s: float = TIMEOUT_S,
    pool: Workers | None = None,
    kernels: KernelSource = "eager",
) -> Costs:
    """Measure a job on as many ranks as the strategy has, all at once.

    Each rank has one thread of the CPU, or a CUDA device of its own if there are any
    (`piper_runtime.rank.values.device`). The following is measured, with the code and the closures of a run and on the
    job's own batches, while all ranks compute:

    - seconds per distinct chunk and step (F, I, W), and per other op of the compute stream, at each number of rows; of
      chunks that devices share, without the messages inside, in whose place a device copies the bytes to send;
    - the same of recomputation (R), under the policies of the strategy and of `keep`;
    - updates, norms, buffers of gradients and their folds, of ranks that keep all of a bucket or a part;
    - point-to-point messages, all-reduces, all-gathers and reduce-scatters over groups of ranks, by size, up to the
      largest activation and the whole gradient (gloo, NCCL); all-to-alls up to 1 MiB;
    - seconds per instruction;
    - growth of resident memory.

    Each is the median over `repeats` passes and all ranks; its spread is their median absolute deviation. On a CPU the
    time in which other programs had a rank's core does not count: of compute it is left out, and of blocks of messages
    the half counts in which threads waited least. So it is as on a machine that is quiet.

    Args:
        job: The job to measure.
        strategy: Its ranks and its rows are measured.
        launcher: "processes" or "ray".
        cluster: For "ray", as in `execute`.
        rows: Rows per microbatch. The default is divisors of the global batch from 1/32 to 1/2 of it, a factor of 2
            apart. The strategy's own are measured in any case.
        keep: Further policies of recomputation, as `recompute` takes them. R of any other is interpolated from F.
        repeats: Passes.
        timeout_s: Seconds without progress after which a rank counts as hung.
        pool: Workers to use again.
        kernels: As in `Options`. With "inductor" a backward that is one graph is measured as the step B.

    Raises JobError, ExecutionError, and the errors of `compile`.
    """
    from piper_runtime.launch import check_float8, launcher_kind, open_pool

    check_float8(job)
    if launcher_kind(launcher).open is None:
        raise ExecutionError(f'profile(launcher={launcher!r}): "processes" and "ray" are accepted')
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise JobError(f"profile(repeats={repeats!r}): an integer of at least 1 is needed")
    job = job.unevaluated
    options = Options(kernels=kernels)
    target = compile(job, strategy, options=options)
    chosen = _rows(job.global_batch, rows, target.plan.rows)
    shares = tuple(d for d in strategy.directives if isinstance(d, shard))
    axes = dict.fromkeys(axis for d in shares for axis in d.axes)
    sizes = tuple((axis, strategy.mesh.size(axis)) for axis in axes)
    alone = Mesh(sizes, strategy.mesh.order)
    one_by_one = (eager(where(chunk=target.graph.eager)),) if target.graph.eager else ()
    alike = (*shares, *one_by_one)
    plain = (*alike, recompute(where(), keep=KEEP_ALL))
    singles = [_one_replica(job, r, alone, plain, options) for r in chosen]
    policies = list(_policies(target, strategy, keep))
    again = [
        _one_replica(job, r, alone, (*alike, policy), options)
        for policy in policies
        for r in chosen
    ]
    _check_measured(target, (*singles, *again))
    sharing = _sharing(job, target.plan.rows, alone, plain, options)
    requests = _requests(target, singles, again, sharing, repeats)
    if pool is not None:
        reports = pool.run(target.plan, requests, timeout_s)
    else:
        with open_pool(launcher, target.plan.mesh.world, cluster=cluster) as own:
            reports = own.run(target.plan, requests, timeout_s)
    by_rank = [reports[r] for r in sorted(reports)]
    chunks = (*target.plan.chunks, *(v for c in again for v in c.plan.variants))
    return _costs(by_rank, chunks, _origin(by_rank[0], target.plan, launcher, repeats))


def _rows(global_batch: int, asked: Sequence[int] | None, own: int) -> list[int]:
    """Return the numbers of rows to measure, ascending; raise JobError for a number that no strategy could use."""
    if asked is not None:
        for r in asked:
            if isinstance(r, bool) or not isinstance(r, int) or not 1 <= r <= global_batch:
                raise JobError(
                    f"profile(rows={list(asked)}): {r!r} is no number of rows of a batch of {global_batch}"
                )
        return sorted({*asked, own})
    least, most = max(1, global_batch // FEWEST_OF_BATCH), max(1, global_batch // MOST_OF_BATCH)
    chosen = [own]
    for r in range(most, least - 1, -1):
        if global_batch % r == 0 and all(max(r, f) / min(r, f) >= APART for f in chosen):
            chosen.append(r)
    return sorted(chosen)


def _one_replica(
    job: Job, rows: int, mesh: Mesh, directives: Sequence[Directive], options: Options
) -> Compiled:
    """Compile the model with one microbatch of these rows, on one device or on all that share its chunks or experts."""
    own = _axes_of_experts(directives)
    replicas = recipes.data_parallel(over=own) if own else ()
    return compile(
        replace(job, global_batch=rows * mesh.degree(own)),
        Strategy(mesh, (*directives, *replicas)),
        options=options,
    )


def _check_measured(target: Compiled, measured: Sequence[Compiled]) -> None:
    """Raise JobError for compiled steps that one microbatch alone does not run.

    It runs a whole backward as the step B, and Inductor compiles the steps of a code that run together.
    """
    codes = {code for c in measured for code in c.plan.codes}
    used = {op.variant for r in target.plan.roles for op in r.table.ops if isinstance(op, Compute)}
    for chunk in (*target.plan.chunks, *target.plan.variants):
        if target.kernels != "eager" and chunk.variant in used and chunk.code not in codes:
            raise JobError(
                f"profile(kernels={target.kernels!r}): the backward of chunk {chunk.id} runs as steps I and W in this "
                f"strategy, and one microbatch alone runs it as one graph; measure a strategy without "
                f"split_backward, recompute(apart=True) and groups, or leave kernels out"
            )


def _axes_of_experts(directives: Sequence[Directive]) -> tuple[str, ...]:
    """Return the axes whose devices share experts, and have rows of their own elsewhere."""
    every = [d for d in directives if isinstance(d, shard)]
    sharing = {axis for d in every if d.shares_tokens for axis in d.axes}
    return tuple(axis for d in every if d.experts for axis in d.axes if axis not in sharing)


def _policies(target: Compiled, strategy: Strategy, more: Sequence[str]) -> Iterator[recompute]:
    """Yield a directive for each policy of recomputation to measure, with the chunks that a strategy has under it."""
    under: dict[str, dict[str, None]] = {}
    for _, _, instr in target.plan.instructions():
        for op in (
            p.op for p in instr.parts if isinstance(p.op, Compute) and p.op.keep != KEEP_ALL
        ):
            under.setdefault(op.keep.removesuffix(HANDS_ON), {})[op.chunk] = None
    groups = {d.keep: d.group for d in strategy.directives if isinstance(d, recompute)}
    for keep, chunks in under.items():
        yield recompute(where(chunk=tuple(chunks)), keep, groups.get(keep, 1))
    for policy in map(_named_policy, more):
        if policy.keep not in under:
            yield policy


def _named_policy(keep: str) -> recompute:
    return recompute(where(), keep)


def _sharing(
    job: Job, rows: int, mesh: Mesh, plain: Sequence[Directive], options: Options
) -> list[Plan]:
    """Return plans of ranks that share states, for the ops on their parts; none if the optimizer cannot share."""
    spec = trained_job("profile", job, None).spec
    if not spec.flat:
        return []
    own = _axes_of_experts(plain)
    jobs = {n: replace(job, global_batch=rows * n * mesh.degree(own)) for n in SHARING}
    zero = (*plain, *recipes.data_parallel(over=("dp", *own), zero=2))
    return [
        compile(of, Strategy(Mesh(mesh.sizes, mesh.order, dp=n), zero), options=options).plan
        for n, of in jobs.items()
    ]


def _requests(
    target: Compiled,
    singles: Sequence[Compiled],
    again: Sequence[Compiled],
    sharing: Sequence[Plan],
    repeats: int,
) -> dict[int, ProfileRequest]:
    from piper_runtime.profile import ProfileRequest
    from piper_runtime.rank import (
        ShippedCode,
        check_same_model,
        materialize,
        pack,
        with_declarations,
    )

    job = target.job
    assert job is not None
    initial = materialize(job)
    check_same_model(target.plan, initial, target.trainable)
    code: dict[int, dict[str, dict[str, ShippedCode]]] = {}
    for c in (target, *singles, *again):
        assert c.code is not None
        exported = c.code.export(c.plan.codes, c.plan.rows)
        code.setdefault(c.plan.rows, {}).update(
            {
                i: {s: ShippedCode(x.source, dict(x.constants)) for s, x in steps.items()}
                for i, steps in exported.items()
            }
        )
    request = ProfileRequest(
        pickle.dumps(target.plan),
        pickle.dumps([c.plan for c in singles]),
        pickle.dumps([c.plan for c in again]),
        pickle.dumps(sharing),
        pickle.dumps(
            pack(
                (job.batch, with_declarations(job.make_optimizers), job.scheduler),
                (job.model, job.loss),
            )
        ),
        code,
        initial.params,
        initial.buffers,
        job.seed,
        repeats,
        _sizes((target.plan, *sharing), singles[-1].plan),
        job.draws,
    )
    return dict.fromkeys(range(target.plan.mesh.world), request)


def _sizes(plans: Sequence[Plan], largest: Plan) -> tuple[int, ...]:
    """Return the bytes of messages to measure, ascending multiples of 4.

    They are the sizes of the first plan, and a grid up to the whole gradient, in the buckets of any of the plans, and
    to the largest boundary between chunks at the most rows.
    """
    traffic = PlanBytes(plans[0])
    own = {
        traffic.message_bytes(part.op, part)
        for _, _, instr in plans[0].instructions()
        for part in instr.parts
        if isinstance(part.op, COMM)
    }
    own |= {
        bind(c.nbytes, 0)
        for chunk in plans[0].chunks
        for sig in chunk.steps.values()
        for c in sig.collectives
    }
    gradient = max(sum(map(bucket_bytes, plan.buckets)) for plan in plans)
    boundary = max(
        (bind(o.spec.nbytes, 0) for c in largest.chunks for o in c.outputs if o.kind == "value"),
        default=0,
    )
    most, grid = max(gradient, boundary), [SMALLEST_MESSAGE]
    while grid[-1] < most:
        grid.append(min(grid[-1] * GRID, most))
    return tuple(sorted({max(4, x // 4 * 4) for x in (*own, *grid)}))


def _origin(report: ProfileReport, plan: Plan, launcher: str, repeats: int) -> Origin:
    on_cuda = bool(report.device)
    return Origin(
        device=report.device or machine_name(),
        cluster=product_cluster(report.device, report.devices).name if on_cuda else CPU,
        backend=report.backend,
        launcher=launcher,
        ranks=plan.mesh.world,
        threads=1,
        python=platform.python_version(),
        torch=version("torch"),
        program=plan.program_key,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        repeats=repeats,
    )


def _costs(reports: Sequence[ProfileReport], chunks: Sequence[Chunk], origin: Origin) -> Costs:
    samples: dict[tuple[str, str, int], list[float]] = {}
    for report in reports:
        for key, seconds in report.parts.items():
            samples.setdefault(key, []).extend(seconds)
    chunk = {c.code: c.id for c in reversed(chunks)}
    steps = [
        StepDuration(code, step, n, _duration(s), chunk[code])  # type: ignore[arg-type]  # a step
        for (code, step, n), s in sorted(samples.items())
        if code
    ]
    parts = [
        PartDuration(op, n, _duration(s)) for (c, op, n), s in sorted(samples.items()) if not c
    ]
    comm = _messages(reports)
    return Costs(
        comm=tuple(comm),
        steps=tuple(steps),
        parts=tuple(parts),
        host=_host(reports),
        allocator=_allocator([r.resident for r in reports if r.resident]),
        origin=origin,
    )


def _messages(reports: Sequence[ProfileReport]) -> list[CommDuration]:
    seconds: dict[tuple[str, int, int, int], list[float]] = {}
    busy: dict[tuple[str, int, int, int], list[float]] = {}
    of_members: dict[tuple[str, tuple[int, ...], int], list[MessageSample]] = {}
    for m in chain.from_iterable(r.messages for r in reports):
        of_members.setdefault((m.op, m.members, m.bytes), []).append(m)
    for (op, members, nbytes), samples in of_members.items():
        nodes, calmest = (
            len({reports[rank].node for rank in members}),
            _calmest([m.waited for m in samples]),
        )
        for m in samples:
            seconds.setdefault((op, len(members), nodes, nbytes), []).extend(
                m.seconds[k] for k in calmest
            )
            busy.setdefault((op, len(members), nodes, nbytes), []).extend(
                m.busy[k] for k in calmest
            )
    return [
        CommDuration(op, nbytes, group, _duration(s), nodes, median(busy[op, group, nodes, nbytes]))
        for (op, group, nodes, nbytes), s in sorted(seconds.items())
    ]


def _calmest(waited: Sequence[Sequence[float]]) -> list[int]:
    """Return the half of the blocks in which the threads of all members waited least for a core.

    A message needs a thread of each of its ends, one after the other, so other programs stretch it by far more than
    the time that they take.
    """
    total = [sum(of) for of in zip(*waited, strict=True)]
    return sorted(range(len(total)), key=total.__getitem__)[: (len(total) + 1) // 2]


def _host(reports: Sequence[ProfileReport]) -> HostCosts:
    """Return seconds per instruction of all repeats and ranks; none for messages on CUDA, whose host is ahead."""
    issue = _duration(max(0.0, s) for r in reports for s in r.issue)
    talk = _duration([max(0.0, s) for r in reports for s in r.talk] or [0.0])
    return HostCosts(issue.seconds, talk.seconds, issue.spread, talk.spread)


def _allocator(resident: Sequence[Sequence[tuple[int, int]]]) -> AllocatorCosts | None:
    """Return the line through bytes of tensors and resident bytes; None with one number of rows.

    It goes through the fewest and the most rows of the largest rank. Its slope is at least 1.
    """
    if not resident or len(resident[0]) < 2:
        return None
    (small, before), (large, after) = (max(r[k] for r in resident) for k in (0, -1))
    factor = max(1.0, (after - before) / (large - small))
    return AllocatorCosts(max(0, round(after - factor * large)), factor)


def _duration(samples: Iterable[float]) -> Duration:
    values = list(samples)
    middle = median(values)
    return Duration(middle, "measured", median(abs(v - middle) for v in values))
