"""Make job, strategy and cluster of a published run: `row`, the one place that says how a row is read.

A table says less than a run has. The columns are taken as they stand; the rest follows from the arch, the
dtype and the words of source and note, by the rules below. Each rule is a fact about the software, with its source, and
none is about a row.

    columns              become
    arch, hidden, ...    a DecoderConfig; gpt has biases, GELU, LayerNorm and learned positions
    stack                the software, whose facts the rules below name: the one given, or the one whose words source
                         and note have
    dtype = fp16         bfloat16, which has as many bytes, gradients too (Megatron-LM's arguments of 2021 to 2023:
                         --accumulate-allreduce-grads-in-fp32 is for bf16); of a gpt in Megatron attention written out
                         with dropout 0.1 (--attention-dropout and --hidden-dropout are 0.1), unless the note says
                         FlashAttention (--use-flash-attn is off by default)
    source has           a gpt with dropout 0.1 outside of attention's kernel
      test_cases/gpt
    vocab                rounded up to a multiple of 128 x tp in Megatron (--make-vocab-size-divisible-by)
    zero                 states sharded over dp x cp, by layers for 3 (FSDP wraps blocks)
    recompute = full     layers keep their inputs
    recompute =          attention again (Megatron, or attention written out), every second layer where the note says
      selective          so, else all but products and attention (torchtitan's default)
    schedule             1f1b and interleaved; zb1p and zb2p are ordered as their software does, with limits of p and
                         2p activations (`zero_bubble_order`)
    experts, top_k,      layers of experts, dropless or with a capacity; dp counts all replicas of the rest, of which ep
      ep, ...            share the experts; beside tp Megatron cuts each expert (expert_tensor_parallel_size is tp
                         unless given: the note then says "ETP 1", and devices along tp and ep share the experts)
    note has             kernels that wait for no launch
      CUDA graphs
    note has CUDA_       kernels of which each begins when the one before has ended and its own launch is over
      LAUNCH_BLOCKING
    note has "4 NICs     that rate between nodes, in place of the one in the file of the device
      of 100 Gb/s"
    note has "HSDP" or   states are shared by the devices of a node, or by so many, and replicated beyond them
      "HSDP over 16"
    note has "gathered   sequence parallelism keeps the tensors that it gathers for the backward
      tensors kept"
    pp x vpp > layers    embedding and head are stages of their own; with 1f1b the first and the last have fewer layers
    nanotron, 1f1b       stages as its build_model cuts them, by the products of layers and head
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from piper import models
from piper.published.run_cluster import NVLINK_DOMAIN, cluster_of, software_of, words_of
from piper.published.run_model import VOCAB, capacity_of, is_megatron, is_nanotron, model_of
from piper.published.run_states import groups_of, shards_gradients, states
from piper.published.table import DEFAULTS, PublishedRow
from piper.published.zero_bubble_order import held_bytes, zero_bubble_order
from piper_compiler import Strategy, partition, recipes, recompute, shard, split
from piper_compiler.directives import Directive
from piper_compiler.directives.partition import Partition
from piper_ir.ground.errors import JobError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import ANY, where
from piper_ir.tools import names
from piper_simulator import ALIASES, Stack

if TYPE_CHECKING:
    from piper_runtime import Job
    from piper_simulator import Cluster

NARROW_WORDS = ("PURE mixed", "reduced in bf16", "NeMo")
"""The words of a note whose software adds up and reduces gradients in bfloat16, as Megatron does in fp16.

Each yaml of NeMo in NVIDIA/dgxc-benchmarking, v24.11.1 to v25.02, has grad_sync_dtype: bf16, and the memory between
steps in its logs of v25.04 is as large as with 16-bit gradients.
"""
MICRO_BATCHES, CHUNKS = (1, 2, 4, 8, 16), (2, 3, 4, 6, 8)
"""The values that are plausible for an open `micro_batch` and an open `vpp` of an interleaved schedule."""


@dataclass(frozen=True)
class PublishedRun:
    """Hold a published run as Piper says it.

    Attributes:
        row: the row, with no open fields.
        job: its model, loss and optimizer.
        strategy: its mesh and directives.
        cluster: its devices, with the software stack.
        sharding: the first directives of the strategy, which stand before those of the schedule.
        rest: the last directives, behind those of the schedule: recomputation, then `replicate`.
        notes: the fields that are taken in the nearest form.
    """

    row: PublishedRow
    job: Job
    strategy: Strategy
    cluster: Cluster
    sharding: tuple[Directive, ...] = ()
    rest: tuple[Directive, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def boundaries(self) -> Any:
        """Return the first layers of the stages, as `partition` takes them."""
        return _boundaries(self.row)

    @property
    def job_text(self) -> str:
        """Return model, batch and precision of the job as text, by which its plans are known."""
        return repr(
            (model_of(self.row)[0], self.job.global_batch, self.job.precision, self.job.clip_norm)
        )


def row(
    published: PublishedRow, *, stack: Stack | str | None = None, times: Any = None
) -> PublishedRun:
    """Return the job, strategy and cluster of a row without open fields (`readings` fills them).

    Args:
        published: The row.
        stack: A software stack or its name, "" for none; None takes the row's own, or the one whose words its source
            and note have.
        times: F, I, W of each stage and the seconds between two, for zb1p and zb2p; 1, 1, 1 and 0 without.

    Raises:
        JobError: a degree does not divide the rows or devices, the device is unknown, or a field is open.
        ClusterError: no such stack.
    """
    cluster = cluster_of(published, stack)
    software = cluster.device.stack
    if software is not None:
        published = replace(published, software=words_of(software))
    microbatches = _microbatches(published)
    config, notes = model_of(published)
    device = cluster.device.name
    if published.pp > 1 and shards_gradients(published):
        notes += ("parameters and gradients of a stage are whole during a step, as torch's are",)
    whole = min(NVLINK_DOMAIN.get(device, cluster.per_node), published.gpus)
    if 2 * cluster.per_node < whole:
        notes += (
            f"NVLink joins {cluster.per_node} devices, since {published.gpus} fill no larger domains",
        )
    if published.schedule.startswith("zb") and config.attention != "math":
        notes += (
            "the order is made for the memory of attention written out, as its software does",
        )
    if published.hw not in (*ALIASES, device):
        notes += (f"{published.hw} is taken as {device}",)
    job = models.job(
        config,
        global_batch=published.global_batch,
        precision=_precision(published),
        clip_norm=1.0 if _clips(published) else None,
    )
    if _updates_alone(published):
        job = replace(job, loss_over="microbatch")
    groups = groups_of(published, cluster.per_node)
    replicas = published.dp // published.ep // groups
    degrees = {"pp": published.pp, "rep": groups, "dp": replicas, "ep": published.ep}
    degrees |= {"cp": published.cp, "tp": published.tp}
    mesh = Mesh(
        tuple((axis, n) for axis, n in degrees.items() if axis not in ("rep", "ep") or n > 1)
    )
    sharding = _sharding(published, software)
    rest = (
        *_recomputation(published, config, software),
        *states(
            published,
            config,
            job.precision,
            groups,
            behind=software is not None and software.gradients == "behind",
        ),
    )
    strategy = Strategy(mesh, (*sharding, *_schedule(published, microbatches, times), *rest))
    return PublishedRun(published, job, strategy, cluster, sharding, rest, notes)


def readings(published: PublishedRow) -> Iterator[PublishedRow]:
    """Yield the row with every plausible value of its open fields; itself if none is open."""
    vocab = published.vocab or VOCAB
    vpps: tuple[int, ...] = (published.vpp or 1,)
    if published.vpp is None and published.schedule == "interleaved":
        vpps = _plausible_chunks(published) or (2,)
    sizes: tuple[int, ...] = (published.micro_batch or 1,)
    if published.micro_batch is None:
        per_replica = published.global_batch // published.dp
        sizes = tuple(
            b
            for b in MICRO_BATCHES
            if per_replica % b == 0
            and (published.schedule != "interleaved" or per_replica // b % published.pp == 0)
        ) or (1,)
    kv_heads = published.kv_heads or published.heads
    ffn = published.ffn or 4 * published.hidden
    for vpp in vpps:
        for size in sizes:
            yield replace(
                published, kv_heads=kv_heads, ffn=ffn, vocab=vocab, vpp=vpp, micro_batch=size
            )


def _plausible_chunks(published: PublishedRow) -> tuple[int, ...]:
    """Return the first numbers of chunks that the layers, or these with embedding and head, divide evenly into."""
    fits = [v for v in CHUNKS if published.layers % (published.pp * v) == 0]
    fits += [v for v in CHUNKS if v not in fits and _divides_all(published, v)]
    return tuple(fits[:3])


def _divides_all(published: PublishedRow, chunks: int) -> bool:
    """Return whether stages get as many units only if embedding and head count as two: Llama-3's 126 + 2."""
    stages = published.pp * chunks
    return published.layers % stages != 0 and (published.layers + 2) % stages == 0


def notes_on_fields(published: PublishedRow) -> tuple[str, ...]:
    """Return notes on open fields that get one value, since no range is plausible, and on fields taken otherwise."""
    said = []
    for name in ("zero", "recompute", "tied", "dtype"):
        if published.fields and not published.fields.get(name):
            said.append(f"{name} is open, and taken as {DEFAULTS[name]}")
    if published.vocab is None:
        said.append(f"vocab is open, and taken as {VOCAB:,}")
    if published.ffn is None and published.arch == "llama" and published.expert_ffn is None:
        said.append("ffn is open, and taken as 4 x hidden")
    if published.kv_heads is None and published.arch == "llama":
        said.append("kv_heads is open: as many as heads")
    if published.vpp is None and published.schedule == "interleaved":
        if not _plausible_chunks(published):
            said.append("vpp is open, and taken as 2, though the layers do not divide into chunks")
    if (published.vpp or 1) > 1 and published.schedule != "interleaved":
        said.append("vpp belongs to interleaved schedules, and is not used")
    if published.zero == 2 and is_megatron(published):
        said.append(
            "zero 2 is taken as 1, since Megatron's distributed optimizer shards no gradients"
        )
    return tuple(said)


def _clips(published: PublishedRow) -> bool:
    """Return whether gradients are scaled by the norm of all: Megatron's default, and in nanotron's configurations."""
    by_default = is_megatron(published) or is_nanotron(published)
    return by_default and not _updates_alone(published)


def _updates_alone(published: PublishedRow) -> bool:
    """Return whether stages update without a value from all others: the norm to clip by, or how many targets count.

    Megatron clips by default, and takes the mean of each microbatch. Zero-bubble pipelines update first and check the
    norm of all gradients later (arXiv 2401.10241, section 4).
    """
    return published.schedule.startswith("zb")


def _precision(published: PublishedRow) -> Any:
    from piper_runtime import Precision

    if "parameters in bf16" in published.note:
        return Precision(params="bfloat16")
    narrow = published.dtype == "fp16" or any(w in published.note for w in NARROW_WORDS)
    narrow = narrow or (is_megatron(published) and names(software_of(published), "NeMo"))
    return Precision(
        params="float32", compute="bfloat16", reduce="bfloat16" if narrow else "float32"
    )


def _microbatches(published: PublishedRow) -> int:
    if published.micro_batch is None:
        raise JobError(f"{published.case}: micro_batch is open; `readings` gives plausible values")
    per_step = published.dp * published.micro_batch
    if published.global_batch % per_step:
        raise JobError(
            f"{published.case}: a batch of {published.global_batch} rows is no multiple of dp x micro_batch, {per_step}"
        )
    degrees = published.dp * published.cp * published.tp * published.pp
    if degrees != published.gpus:
        raise JobError(
            f"{published.case}: dp x cp x tp x pp is {degrees}, and there are {published.gpus} devices"
        )
    if published.heads % published.tp:
        raise JobError(
            f"{published.case}: tp = {published.tp} does not divide {published.heads} heads, so that no device has its part"
        )
    for column, width in _cut_widths(published).items():
        if width % published.tp:
            raise JobError(
                f"{published.case}: tp = {published.tp} does not divide {column} = {width}, so that no device has its part"
            )
    if published.pp > 1 and published.schedule == "none":
        raise JobError(
            f"{published.case}: pp = {published.pp}, and schedule is none: give 1f1b, interleaved, zb1p or zb2p"
        )
    if published.dp % published.ep:
        raise JobError(
            f"{published.case}: ep = {published.ep} does not divide dp = {published.dp}; experts are shared by a part of "
            f"the replicas: with whole experts on each device (ETP 1) give Megatron's ep divided by tp"
        )
    if published.ep > 1 and published.experts is None:
        raise JobError(
            f"{published.case}: ep = {published.ep}, and the row has no experts: give experts and top_k"
        )
    if published.experts is not None and published.dense_layers >= published.layers:
        raise JobError(
            f"{published.case}: dense_layers = {published.dense_layers} leaves none of {published.layers} layers with "
            f"experts"
        )
    looped = _is_looped(published)
    stages = published.pp * (published.vpp or 1) if looped else published.pp
    most = published.layers + 2 * looped  # the embedding and the head may be stages of their own
    if stages > most:
        raise JobError(
            f"{published.case}: {'pp x vpp' if looped else 'pp'} is {stages} stages, and {published.layers} layers make "
            f"at most {most}"
        )
    return published.global_batch // per_step


def _cut_widths(published: PublishedRow) -> dict[str, int]:
    """Return the widths that tp cuts, by the column that says them."""
    ffn = published.ffn or 4 * published.hidden
    widths = {"ffn": ffn} if published.experts is None or published.dense_layers else {}
    if published.experts is not None and _cuts_experts(published):
        widths["expert_ffn" if published.expert_ffn else "ffn"] = published.expert_ffn or ffn
    return widths


def _cuts_experts(published: PublishedRow) -> bool:
    """Return whether tp cuts each expert: Megatron's expert_tensor_parallel_size is tp unless the note says "ETP 1"."""
    beside = published.tp > 1 and published.seq_parallel
    return beside and is_megatron(published) and "ETP 1" not in published.note


def _sharding(published: PublishedRow, stack: Stack | None) -> tuple[Directive, ...]:
    directives: tuple[Directive, ...] = ()
    if published.tp > 1:
        stream: Literal["tokens", ""] = "tokens" if published.seq_parallel else ""
        keep = published.says("gathered tensors kept")
        directives += (shard(where(), over="tp", stream=stream, keep=keep),)
    if published.ep > 1 and capacity_of(published) is not None:
        directives += recipes.expert_parallel()
    elif published.ep > 1:
        cut = _cuts_experts(published)
        joint = published.tp > 1 and published.seq_parallel and not cut
        joint = joint and (published.experts or 0) % (published.tp * published.ep) == 0
        exact = stack is not None and stack.places == "rows"
        directives += recipes.expert_parallel(
            over=("tp", "ep") if joint else "ep",
            bound=1.0 if exact or _is_even(published) else 1.25,
            hidden="tp" if cut else "",
        )
    if published.cp > 1:
        exchange = _exchange(published)
        order: Any = "zigzag" if exchange == "ring" else ""
        directives += recipes.context_parallel(attention=exchange, order=order)
    return directives


def _is_even(published: PublishedRow) -> bool:
    """Return whether every expert gets as many tokens: by places that are filled up, or by force."""
    return bool(published.capacity) or "force-balance" in published.text


def _exchange(published: PublishedRow) -> Literal["heads", "ring"]:
    """Return how attention is shared over cp.

    SimuMax's release notes say all-to-all; Megatron-Core's default is the ring, with zigzag chunks.
    """
    return "heads" if "SimuMax" in published.text else "ring"


def _schedule(published: PublishedRow, microbatches: int, times: Any) -> tuple[Directive, ...]:
    pp, vpp = published.pp, published.vpp or 1
    if published.schedule == "none" or pp == 1:
        return (split(where(), microbatches=microbatches),)
    stages = pp * vpp
    if _is_looped(published):
        found = recipes.interleaved(pp=pp, microbatches=microbatches, chunks=vpp)
        if stages <= published.layers and not _divides_all(published, vpp):
            return found
        whole = partition(stages=stages, units="all")
        return tuple(whole if isinstance(d, Partition) else d for d in found)
    at = _boundaries(published)
    if published.schedule in ("1f1b", "interleaved"):
        found = recipes.one_f_one_b(pp=pp, microbatches=microbatches, at=at)
        if at == "even" or published.layers not in at:
            return found
        alone = partition(stages=pp, at=at, units="head")
        return tuple(alone if isinstance(d, Partition) else d for d in found)
    ones = (1.0,) * pp
    seconds = times or {"F": ones, "I": ones, "W": ones, "hop": 0.0}
    orders = zero_bubble_order(
        (seconds["F"], seconds["I"], seconds["W"]),
        seconds["hop"],
        microbatches,
        held_bytes(published.hidden, published.heads, published.seq),
        pp if published.schedule == "zb1p" else 2 * pp,
    )
    return recipes.scheduled(orders, microbatches=microbatches, at=at)


def _is_looped(published: PublishedRow) -> bool:
    """Return whether a pipeline rank has several chunks; interleaving of one is 1F1B."""
    return published.pp > 1 and published.schedule == "interleaved" and (published.vpp or 1) > 1


def _boundaries(published: PublishedRow) -> Any:
    """Return where stages begin: if two layers are missing, the first and the last stage have one fewer."""
    layers, stages = published.layers, published.pp
    if is_nanotron(published):
        return _by_products(published)
    each, rest = divmod(layers + 2, stages)
    if layers % stages == 0 or rest or each < 2:
        return "even"
    return tuple(each * k - 1 for k in range(1, stages))


def _by_products(published: PublishedRow) -> tuple[int, ...]:
    """Return where the stages of nanotron begin (models/base.py, build_model).

    A stage ends with the layer that exceeds its share of the parameters in products, to which the head's belong.
    """
    h, ffn = published.hidden, published.ffn or 4 * published.hidden
    layer, head = h * (4 * h + 3 * ffn), h * (published.vocab or VOCAB)
    share = (published.layers * layer + head) / published.pp
    starts: list[int] = []
    for done in range(1, published.layers + 1):
        if done * layer > share * (len(starts) + 1):
            starts.append(done)
    return tuple(starts)


def _recomputation(
    published: PublishedRow, config: models.DecoderConfig, stack: Stack | None
) -> tuple[Directive, ...]:
    if published.recompute == "none":
        if stack is None or not config.gated or config.activation not in stack.remakes:
            return ()
        return (recompute(where(layer=ANY), keep="inputs", modules="*.activation"),)
    if published.recompute == "full":
        return (recompute(where(layer=ANY), keep="inputs"),)
    if config.attention == "math" or is_megatron(published):
        return (recompute(where(layer=ANY), keep="outputs", modules="*.attention.core"),)
    if "every second layer" in published.note:
        second = tuple(range(0, published.layers, 2))
        return (recompute(where(layer=second), keep="inputs"),)
    return (recompute(where(layer=ANY), keep="products"),)
