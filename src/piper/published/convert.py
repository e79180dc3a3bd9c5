"""Make job, strategy and cluster of a published run: `row`, the one place that says how a row is read.

A table says less than a run has. The columns are taken as they stand; the rest follows from the arch, the
dtype and the words of source and note, by the rules below. Each rule is a fact about the software, with its source, and
none is about a row.

    columns              become
    arch, hidden, ...    a DecoderConfig; gpt has biases, GELU, LayerNorm and learned positions
    dtype = fp16         bfloat16, which has as many bytes, gradients too (Megatron-LM's arguments of 2021 to 2023:
                         --accumulate-allreduce-grads-in-fp32 is for bf16); of a gpt attention written out with
                         dropout 0.1 (--attention-dropout and --hidden-dropout are 0.1, --use-flash-attn is off)
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
    pp x vpp > layers    embedding and head are stages of their own; with 1f1b the first and the last have fewer layers
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from piper import models
from piper.published.table import PublishedRow
from piper.published.zero_bubble_order import held_bytes, zero_bubble_order
from piper_compiler import Strategy, partition, recipes, recompute, replicate, split
from piper_compiler.directives import Directive
from piper_compiler.directives.partition import Partition
from piper_ir.ground.errors import ClusterError, JobError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import ANY, where
from piper_simulator import (
    ALIASES,
    DEVICES,
    STACKS,
    Cluster,
    Stack,
    load_cluster,
    read_software,
    stacks_of,
    with_stack,
)

if TYPE_CHECKING:
    from piper_runtime import Job

VOCAB = 32_000
"""The tokens of a row that leaves its vocab open: that of sentencepiece models, as open Megatron forks train with."""
PADDED = 128
"""The number of which, times tp, Megatron makes a vocabulary a multiple."""
WHOLE_MB = 2**20
"""The MiB of a bucket that holds all gradients of a role, for software that reduces them after the backward."""
NARROW_WORDS = ("PURE mixed", "reduced in bf16", "NeMo")
"""The words of a note whose software adds up and reduces gradients in bfloat16, as Megatron does in fp16.

Each yaml of NeMo in NVIDIA/dgxc-benchmarking, v24.11.1 to v25.02, has grad_sync_dtype: bf16, and the memory between
steps in its logs of v25.04 is as large as with 16-bit gradients.
"""
BUCKET_PER_REPLICA = 10**6
"""The parameters of a bucket of gradients per replica in Megatron-Core, and 40 million at least.

distributed/distributed_data_parallel.py: rings of many devices need large messages. Apex's distributed_fused_adam has
buckets of one size.
"""
NVLINK_DOMAIN = {"gb200-186g": 72}
"""The devices that NVLink joins, where they are more than a node."""
MICRO_BATCHES, CHUNKS = (1, 2, 4, 8, 16), (2, 3, 4, 6, 8)
"""The values that are plausible for an open `micro_batch` and an open `vpp` of an interleaved schedule."""
LATENT = models.Latent(q_rank=1_536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
"""The latent attention of DeepSeek-V2 and V3 (arXiv 2405.04434, section 3.1.2), which others took over."""
GOLDEN = "functional_tests/test_cases/gpt"
"""The tests of Megatron-LM whose models leave --hidden-dropout at 0.1, its default."""
MODEL_WORDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("latent attention", {"latent": LATENT, "kv_heads": None}),
    ("ALiBi", {"positions": "none"}),  # FlashAttention's kernel adds the bias to the scores
    ("squared ReLU", {"activation": "squared_relu", "attention_bias": "none", "mlp_bias": False}),
    ("rotary", {"positions": "rotary"}),
    ("gated GELU", {"activation": "gelu"}),
    ("QK norm", {"qk_norm": True}),
    ("dropout 0.1", {"dropout": 0.1}),
)
"""The words of a note that change a model."""


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
        return _boundaries(self.row.layers, self.row.pp)

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
    microbatches = _microbatches(published)
    config, notes = model_of(published)
    device = cluster.device.name
    if published.hw not in (*ALIASES, device):
        notes += (f"{published.hw} is taken as {device}",)
    job = models.job(
        config,
        global_batch=published.global_batch,
        precision=_precision(published),
        clip_norm=1.0 if _is_megatron(published) and not _updates_alone(published) else None,
    )
    if _updates_alone(published):
        job = replace(job, loss_over="microbatch")
    degrees = {"pp": published.pp, "dp": published.dp // published.ep, "ep": published.ep}
    degrees |= {"cp": published.cp, "tp": published.tp}
    mesh = Mesh(tuple((axis, n) for axis, n in degrees.items() if axis != "ep" or n > 1))
    software = cluster.device.stack
    sharding = _sharding(published, software)
    rest = (
        *_recomputation(published, config, software),
        *_states(published, config, software is not None and software.gradients == "behind"),
    )
    strategy = Strategy(mesh, (*sharding, *_schedule(published, microbatches, times), *rest))
    return PublishedRun(published, job, strategy, cluster, sharding, rest, notes)


def readings(published: PublishedRow) -> Iterator[PublishedRow]:
    """Yield the row with every plausible value of its open fields; itself if none is open."""
    vocab = published.vocab or VOCAB
    vpps: tuple[int, ...] = (published.vpp or 1,)
    if published.vpp is None and published.schedule == "interleaved":
        vpps = tuple(v for v in CHUNKS if published.layers % (published.pp * v) == 0)[:3] or (2,)
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


def cluster_of(published: PublishedRow, stack: Stack | str | None = None) -> Cluster:
    """Return the cluster of a row, with its software stack if there is one."""
    device = _device(published.hw)
    if not device:
        raise JobError(
            f"{published.case}: no device {published.hw!r} is described; known are {', '.join(DEVICES)}: correct the "
            f"column hw"
        )
    most = NVLINK_DOMAIN.get(device, published.gpus_per_node or 8)
    per_node = max((n for n in range(1, most + 1) if published.gpus % n == 0), default=1)
    if device not in NVLINK_DOMAIN:
        per_node = min(most, published.gpus)
    if published.gpus % per_node:
        raise JobError(
            f"{published.case}: {published.gpus} devices do not fill nodes of {per_node}"
        )
    cluster = load_cluster(f"{device}:{per_node}*{published.gpus // per_node}")
    if stack is None:
        stack = published.stack or stack_for(published, device)
    if stack:
        cluster = with_stack(cluster, stack if isinstance(stack, Stack) else stack_named(stack))
    if published.says("CUDA graphs"):
        cluster = cluster.each_device(lambda one: replace(one, launch_s=0.0))
    return cluster


def _device(hw: str) -> str:
    """Return the device of a name, or of the longest alias that it begins with; "" if there is none."""
    if hw in DEVICES:
        return hw
    begins = [alias for alias in ALIASES if hw == alias or hw.startswith(f"{alias}-")]
    return ALIASES[max(begins, key=len)] if begins else ""


def stack_for(published: PublishedRow, device: str) -> str:
    """Return the name of the stack whose words a row has; else one of its generation that is like it; else "".

    A row that shares layers or stages is taken as Megatron, any other as eager torch.
    """
    like = "Megatron" if published.tp * published.pp * published.cp > 1 else "eager"
    fitting = stacks_of(device, published.note, published.source, like)
    return fitting[0] if fitting else ""


def stack_named(name: str) -> Stack:
    """Return a stack by name, or from a file that ends in .toml; raise ClusterError if there is none."""
    if name.endswith(".toml"):
        return read_software(Path(name), STACKS)
    if name not in STACKS:
        raise ClusterError(
            f"no stack {name!r}; known are {', '.join(STACKS)}, and files that end in .toml"
        )
    return STACKS[name]


@cache  # rows of one model share one capture, and captures are found by their callables
def _config(fields: tuple[tuple[str, Any], ...]) -> models.DecoderConfig:
    return models.DecoderConfig(**dict(fields))


def model_of(published: PublishedRow) -> tuple[models.DecoderConfig, tuple[str, ...]]:
    """Return the model of a row, and notes on fields in the nearest form."""
    vocab = published.vocab or VOCAB
    if _is_megatron(published) or published.tp > 1:
        step = PADDED * published.tp
        vocab = -(-vocab // step) * step
    fields: dict[str, Any] = {
        "layers": published.layers,
        "width": published.hidden,
        "heads": published.heads,
        "kv_heads": published.kv_heads,
        "hidden": published.ffn or 4 * published.hidden,
        "vocab": vocab,
        "length": published.seq,
        "tied": published.tied,
    }
    notes = []
    if published.arch == "gpt":
        written = published.dtype == "fp16"
        fields |= {"activation": "gelu_tanh", "gated": False, "norm": "layernorm"}
        fields |= {"attention_bias": "all", "mlp_bias": True, "positions": "learned"}
        fields |= {"attention": "math" if written else "fused"}
        if written:
            fields["dropout"] = 0.1
            notes.append("float16 is computed as bfloat16, which has as many bytes")
        elif GOLDEN in published.source:
            fields["dropout"] = 0.1
    if published.experts is not None:
        hidden = published.expert_ffn or fields["hidden"]
        fields["dense_layers"] = published.dense_layers
        fields["experts"] = models.Experts(
            number=published.experts,
            top_k=published.top_k or 1,
            hidden=hidden,
            shared_hidden=hidden * published.shared_experts,
            capacity_factor=_capacity(published),
        )
        if _capacity(published) is None:
            capacity = published.capacity or 1
            if capacity != 1:
                few = "too few" if capacity > 1 else "too many"
                notes.append(
                    f"experts are dropless, and have {few} rows for a capacity of {capacity:g}"
                )
            if published.ep > 1 and published.tp > 1 and not published.seq_parallel:
                notes.append(
                    "experts are whole along tp, which repeats their work: give seq_parallel"
                )
    for words, changes in MODEL_WORDS:
        if published.says(words):
            fields |= changes
    if published.experts is not None and fields.get("mlp_bias"):
        fields |= {"mlp_bias": False, "experts": replace(fields["experts"], bias=True)}
    if fields.get("dropout") and fields.get("attention") != "math":
        fields["attention_dropout"] = 0.0
        notes.append("attention's kernel draws no dropout")
    return _config(tuple(sorted(fields.items()))), tuple(notes)


def _is_megatron(published: PublishedRow) -> bool:
    words = ("Megatron", "NeMo", "vTrain", "SC21", "Zero Bubble", "Korthikanti")
    return published.dtype == "fp16" or any(word in published.text for word in words)


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
    if published.dp % published.ep:
        raise JobError(
            f"{published.case}: ep = {published.ep} does not divide dp = {published.dp}; experts are shared by a part of "
            f"the replicas"
        )
    return published.global_batch // per_step


def _sharding(published: PublishedRow, stack: Stack | None) -> tuple[Directive, ...]:
    directives: tuple[Directive, ...] = ()
    if published.tp > 1:
        directives += recipes.tensor_parallel(sequence=published.seq_parallel)
    if published.ep > 1 and _capacity(published) is not None:
        directives += recipes.expert_parallel()
    elif published.ep > 1:
        beside_tp = published.tp > 1 and published.seq_parallel
        cut = beside_tp and _is_megatron(published) and "ETP 1" not in published.note
        joint = beside_tp and not cut
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


def _capacity(published: PublishedRow) -> float | None:
    """Return the capacity of a row's experts; None where they are dropless, or devices share the tokens of a row."""
    shared = published.cp > 1 or (published.tp > 1 and published.seq_parallel)
    return None if shared else published.capacity


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
    if published.schedule == "interleaved":
        found = recipes.interleaved(pp=pp, microbatches=microbatches, chunks=vpp)
        if stages <= published.layers:
            return found
        whole = partition(stages=stages, units="all")
        return tuple(whole if isinstance(d, Partition) else d for d in found)
    at = _boundaries(published.layers, pp)
    if published.schedule == "1f1b":
        return recipes.one_f_one_b(pp=pp, microbatches=microbatches, at=at)
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


def _boundaries(layers: int, stages: int) -> Any:
    """Return where stages begin: if two layers are missing, the first and the last stage have one fewer."""
    each, rest = divmod(layers + 2, stages)
    if layers % stages == 0 or rest or each < 2:
        return "even"
    return tuple(each * k - 1 for k in range(1, stages))


def _recomputation(
    published: PublishedRow, config: models.DecoderConfig, stack: Stack | None
) -> tuple[Directive, ...]:
    if published.recompute == "none":
        if stack is None or not config.gated or config.activation not in stack.remakes:
            return ()
        return (recompute(where(layer=ANY), keep="inputs", modules="*.activation"),)
    if published.recompute == "full":
        return (recompute(where(layer=ANY), keep="inputs"),)
    if config.attention == "math" or _is_megatron(published):
        return (recompute(where(layer=ANY), keep="outputs", modules="*.attention.core"),)
    if "every second layer" in published.note:
        second = tuple(range(0, published.layers, 2))
        return (recompute(where(layer=second), keep="inputs"),)
    return (recompute(where(layer=ANY), keep="products"),)


@cache
def _unit_parameters(config: models.DecoderConfig, ep: int) -> int:
    """Return the parameters of a block (of one with experts, if there are any) that FSDP gathers at once.

    Experts that `ep` devices share have buckets of their own, which no other layer joins if they are larger.
    """
    experts = config.experts
    one, two = (replace(config, layers=n, dense_layers=0) for n in (1, 2))
    block = models.parameter_count(two) - models.parameter_count(one)
    if experts is None or ep == 1:
        return block
    matrices = 3 if config.gated else 2
    return block - experts.number * matrices * config.width * experts.hidden


def _states(
    published: PublishedRow, config: models.DecoderConfig, behind: bool
) -> tuple[Directive, ...]:
    if published.dp * published.cp == 1 and published.zero == 0:
        return (replicate(where(), over="dp"),)
    over = ("dp", *(["ep"] if published.ep > 1 else []))
    over = (*over, "cp") if published.cp > 1 and published.zero else over
    item = 2 if _precision(published).reduce == "bfloat16" else 4
    if published.zero == 3 or (published.zero == 2 and not _is_megatron(published)):
        unit = _unit_parameters(config, published.ep)
        bucket = max(25.0, float(round(item * unit / published.tp / 2**20 * 1.01)))
        # torch's stages gather parameters, and reduce gradients, once a step.
        once: dict[str, Any] = {"resident_mb": "step", "reduced_mb": "step"}
        stay = once if published.pp > 1 else {}
        return (replicate(where(), over, published.zero, bucket_mb=bucket, **stay),)  # type: ignore[arg-type]  # 2 or 3
    whole = behind or "bucketing off" in published.note
    grows = _is_megatron(published) and "distributed_fused_adam" not in published.note
    replicas = published.dp * published.cp if grows else 0
    bucket = max(160.0, item * replicas * BUCKET_PER_REPLICA / 2**20)
    return (replicate(where(), over, published.zero, bucket_mb=WHOLE_MB if whole else bucket),)  # type: ignore[arg-type]  # 0 to 3
