"""Write a job as options of torchtitan's command line, beside a recipe of the same model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import inf

from piper_interop.neutral.described import DeviceLayout, JobDescription, axes_of_experts
from piper_interop.neutral.system import Exported
from piper_interop.neutral.units import by_layer, unit_mb
from piper_interop.neutral.writer import check_batch
from piper_interop.torchtitan.describe import SCHEDULES
from piper_ir.ground.errors import JobError
from piper_ir.ground.sizes import ITEM_BYTES

FILE = "torchtitan.args"
NAMES = {recipe: name for name, (recipe, _) in SCHEDULES.items()}
"""The names of schedules in torchtitan, in small letters, by the recipes here."""
CONVERTERS = {
    "rowwise": 'Float8LinearConverter.Config(recipe_name="rowwise")',
    "rowwise_with_gw_hp": 'Float8LinearConverter.Config(recipe_name="rowwise_with_gw_hp")',
    "mxfp8": "MXFP8LinearConverter.Config()",
}
"""The parts of a recipe of torchtitan by the recipes of float8."""
CHECKPOINTING = {"inputs": "full", "products/2": "selective"}
"""The names of activation checkpointing in torchtitan by the policies here."""


def export(described: JobDescription) -> Exported:
    """Return the options, one on each line, for the recipe of the model.

    Raises JobError that names all parts of the strategy that torchtitan does not have.
    """
    check_batch(described)
    lacking = [
        *_layout_lacks(described.layout),
        *_memory_lacks(described),
        *_model_lacks(described),
    ]
    if lacking:
        raise JobError(
            "torchtitan cannot run this strategy:\n" + "\n".join(f"  {text}" for text in lacking)
        )
    lines = [_line(name, value) for name, value in _options(described)]
    # A kind of checkpointing is a subcommand of torchtitan's command line, which stands last.
    lines.append(f"activation-checkpoint:{_checkpointing(described)}")
    return Exported({FILE: "\n".join(lines) + "\n"}, tuple(_notes(described)))


def _line(name: str, value: object) -> str:
    """Return an option as torchtitan's command line takes it: a switch is its name, or "no-" before it."""
    section, _, option = name.rpartition(".")
    if isinstance(value, bool):
        return f"--{section}.{option if value else f'no-{option}'}"
    if isinstance(value, list):
        return f"--{name} {' '.join(value)}"
    return f"--{name}={value}"


def _checkpointing(described: JobDescription) -> str:
    kinds = [CHECKPOINTING[part.keep] for part in described.recompute]
    return kinds[0] if kinds else "none"


def _layout_lacks(layout: DeviceLayout) -> Iterator[str]:
    if layout.schedule not in NAMES and layout.pp > 1:
        yield f"the schedule {layout.schedule}; the nearest is one_f_one_b, or one of {', '.join(NAMES)}"
    if layout.zero in (1, 2):
        yield f"zero={layout.zero}; the nearest is zero=3 with resident_mb='step'"
    if layout.cp > 1 and layout.attention != "gather":
        yield f"context_parallel(attention={layout.attention!r}); the nearest is 'gather'"
    if layout.cp > 1 and not (layout.zero and layout.over_cp):
        yield "states that are whole along cp; the nearest shares them over dp and cp, with zero=3"
    axes = axes_of_experts(layout.ep, layout.tp, layout.cp, layout.dp)
    if layout.hidden:
        yield f"experts cut over {', '.join(layout.hidden)}; the nearest has whole ones over more devices"
    elif layout.ep > 1 and (axes is None or axes.folded != layout.folded):
        nearest = tuple(axis for axis in ("tp", "cp") if getattr(layout, axis) > 1)
        yield f"experts over replicas beside {', '.join(nearest)}; the nearest is over={(*nearest, 'ep')!r}"


def _memory_lacks(described: JobDescription) -> Iterator[str]:
    for part in described.recompute:
        if part.keep not in CHECKPOINTING or part.layers is not None or part.group > 1:
            instead = "products/2" if part.keep.startswith("products") else "inputs"
            of = " of some layers" if part.layers is not None or part.group > 1 else ""
            yield f"recompute(keep={part.keep!r}){of}; the nearest is keep={instead!r} for all layers"
    if described.optim_on_host and not (described.params_on_host and described.layout.zero):
        yield "an optimizer alone on the host; the nearest has tensors='states' with zero=3"
    if described.offload is not None:
        yield "activations that wait on the host; the nearest recomputes them"
    if len(described.recompute) > 1:
        yield "several policies of recomputation; the nearest is keep='inputs' for all layers"


def _model_lacks(described: JobDescription) -> Iterator[str]:
    stages_in = described.layout.pp > 1
    if "layers" not in described.sizes.fields and stages_in:
        yield "stages of a model that is none of piper.models, whose modules' names are not known"
    elif stages_in and not all(stages(described)):
        yield "stages without a module; the nearest gives each stage a layer"
    if described.sizes.fields.get("mtp"):
        yield "blocks that predict further tokens; the nearest is mtp=0"
    if not described.sizes.fields.get("causal", True):
        yield "an encoder; torchtitan has decoders"
    if described.float8 is not None and described.float8.recipe not in CONVERTERS:
        yield f"float8 by the recipe {described.float8.recipe}; the nearest is rowwise"
    if described.optimizer != "adamw":
        yield f"the optimizer {described.optimizer}; the nearest is adamw"
    if described.reduce != "float32":
        yield f"gradients that are reduced in {described.reduce}; the nearest is float32"
    if described.accumulate not in ("", described.params):
        yield f"gradients that are summed in {described.accumulate}; the nearest is {described.params}"


def _options(described: JobDescription) -> Iterator[tuple[str, object]]:
    layout = described.layout
    if described.length:  # a job need not say the tokens of its rows
        yield "training.seq_len", described.length
    yield (
        "training.local_batch_size",
        described.rows * (described.microbatches if layout.pp > 1 else 1),
    )
    yield "training.global_batch_size", described.global_batch
    yield "training.dtype", described.params
    if described.params_on_host:
        yield "training.enable_cpu_offload", True
    yield "training.mixed_precision_param", described.compute
    yield "training.max_norm", described.clip_norm or inf  # torchtitan always clips
    shards = layout.dp if layout.zero else 1
    yield "parallelism.data_parallel_shard_degree", shards
    yield "parallelism.data_parallel_replicate_degree", layout.dp_replicate * layout.dp // shards
    yield "parallelism.tensor_parallel_degree", layout.tp
    yield "parallelism.enable_sequence_parallel", layout.sequence
    yield "parallelism.context_parallel_degree", layout.cp
    yield "parallelism.expert_parallel_degree", layout.ep
    if layout.zero == 3:
        yield "parallelism.fsdp_reshard_after_forward", "always" if layout.reshard else "never"
    yield "compile.enable", described.stack == "inductor" or layout.pieces > 1
    if layout.pieces > 1:
        yield "compile.enable_async_tensor_parallel", True
    if described.loss_tiles > 1:
        yield "loss.num_chunks", described.loss_tiles
    if layout.pp > 1:
        yield from _pipeline(described, layout)


def _pipeline(described: JobDescription, layout: DeviceLayout) -> Iterator[tuple[str, object]]:
    yield "training.disable_cuda_graphs", True
    yield "parallelism.pipeline_parallel_degree", layout.pp
    yield "parallelism.pipeline_parallel_schedule", NAMES[layout.schedule]
    yield "parallelism.pipeline_parallel_microbatch_size", described.rows
    yield "parallelism.module_fqns_per_model_part", [",".join(part) for part in stages(described)]


def stages(described: JobDescription) -> list[list[str]]:
    """Return the names of torchtitan's modules on each stage."""
    layout = described.layout
    layers = int(described.sizes.fields["layers"])
    count = layout.pp * layout.chunks
    at = layout.at
    if at and layout.units == "all":  # the embedding is unit 0, so layer k is unit k + 1
        at = tuple(unit - 1 for unit in at)
    bounds = [0, *at, layers] if at else [-(-k * layers // count) for k in range(count + 1)]
    parts = [[f"layers.{k}" for k in range(a, b)] for a, b in pairwise(bounds)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return parts


def _notes(described: JobDescription) -> Iterator[str]:
    float8 = described.float8
    if not described.length:
        yield "the tokens of a row are the recipe's: the job has no tokens_per_row"
    if described.loss_tiles == 1:
        yield "the loss is in the recipe's chunks of tokens, 8 in most: a little less memory"
    yield f"the learning rate is the recipe's: the job has {described.lr:g}"
    if float8 is not None:
        leaves_out = (
            "" if float8.modules == ("*",) and not float8.keep else "; it leaves lm_head out"
        )
        yield f"the recipe of the model needs {CONVERTERS[float8.recipe]} among its converters{leaves_out}"
    layout = described.layout
    unit = unit_mb(described.sizes, layout.tp, layout.ep, ITEM_BYTES[described.reduce])
    if layout.zero == 3 and layout.bucket_mb != unit:
        yield by_layer(layout.bucket_mb, unit)
    if layout.zero == 3 and described.microbatches > 1 and layout.reduce_once != (layout.pp > 1):
        yield f"gradients are scattered {'once a step' if layout.pp > 1 else 'for each microbatch'}"
    if not layout.overlap:
        yield "FSDP runs its messages beside compute"
    if layout.beside:
        yield "shared experts are computed before the exchange of rows"
    if layout.pieces > 1:
        yield "asynchronous tensor parallelism needs compile, and cuts products into as many pieces as devices"
    if layout.order:
        yield "torchtitan's mesh has stages outermost"
    if layout.whole_mb:
        yield f"FSDP shards parameters below {layout.whole_mb:g} MiB, too"
    if _checkpointing(described) == "selective" and any(
        r.keep == "products" for r in described.recompute
    ):
        yield "selective checkpointing keeps every second product, keep='products' all of them"
    yield "the options are those of version 0.3.0; run_train.sh takes them behind --module and --config"
    if layout.pp > 1:
        yield "CUDA graphs do not go with a pipeline: the file turns them off"
