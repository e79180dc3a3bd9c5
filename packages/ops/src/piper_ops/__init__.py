"""Define portable ops, which stay one node in a traced graph on every device although their kernels differ by device.

Importing this package registers the ops `piper::attention`, `piper::layer_norm`, `piper::rms_norm` and
`piper::cross_entropy` with their gradients, the ops of `vocabulary`, `context`, `experts` and `float8`, and the
collectives inside of steps. Other packages import names from here.
"""

from piper_ops.attention.context import context_add, context_add_, context_merge, context_take
from piper_ops.attention.lowering import Lowering, attention_lowering
from piper_ops.attention.sdpa import attention, attention_dgrad
from piper_ops.attention.sinks import attention_with_sinks
from piper_ops.costing.attention_lowerings import is_written_on_cpu
from piper_ops.costing.costs import KernelInfo, kernel_of, op_cost, own_costs
from piper_ops.costing.registry import PORTABLE, Formula, PortableOp
from piper_ops.costing.room import room_of_rounds
from piper_ops.costing.workspace import (
    Workspace,
    cpu_workspace,
    cuda_workspace,
    peak_bytes_inside,
)
from piper_ops.experts.biases import grouped_add, grouped_add_wgrad
from piper_ops.experts.experts import (
    grouped_mm,
    grouped_mm_dgrad,
    grouped_mm_wgrad,
    grouped_mm_wgrad_,
    route,
    route_dgrad,
    unroute,
    unroute_dgrad,
    unroute_wgrad,
)
from piper_ops.experts.rounds import (
    ANY_ROWS,
    AXIS,
    BODY,
    PLACED,
    ROUNDS,
    WITHIN,
    ExpertBody,
    experts_checked,
    experts_drop,
    experts_further_dgrad_,
    experts_further_wgrad_,
    experts_give,
    experts_home,
    experts_return,
    experts_return_dgrad,
    experts_return_wgrad,
    experts_send,
    experts_take,
)
from piper_ops.float8.products import float8_linear, float8_mm
from piper_ops.float8.quantise import float8_cast, float8_past_scale, float8_scale
from piper_ops.float8.recipes import RECIPES, Float8
from piper_ops.ground.errors import ExpertsOverflow, UnsupportedVariant, WrongCost
from piper_ops.ground.library import DIRECT, OP_KERNELS, dtype_name
from piper_ops.inductor.decompositions import DECOMPOSITIONS
from piper_ops.inductor.fusions import FusionForm, compiled_fusion, fusion, lowered
from piper_ops.pointwise.batches import Constant, batch_leaves, batch_pair, is_shared, shared
from piper_ops.pointwise.collectives import (
    COLLECTIVE_KINDS,
    all_gather,
    all_reduce,
    all_reduce_,
    all_to_all,
    reduce_scatter,
    shift,
    wait,
)
from piper_ops.pointwise.losses import cross_entropy, cross_entropy_dgrad
from piper_ops.pointwise.norms import (
    layer_norm,
    layer_norm_backward,
    layer_norm_dgrad,
    layer_norm_wgrad,
    rms_norm,
    rms_norm_dgrad,
    rms_norm_wgrad,
)
from piper_ops.pointwise.vocabulary import (
    cross_entropy_joined,
    cross_entropy_part,
    cross_entropy_part_dgrad,
    embedding_part,
    embedding_part_dgrad,
)
from piper_ops.random.counter import Key, key_of, signed
from piper_ops.random.draw_kernels import is_draw, refusal_of_draw
from piper_ops.random.draws import DrawsOfCall, draw, drawing
from piper_ops.rewriting.batch_norm import BATCH_NORMS, STATISTICS, BatchNorm
from piper_ops.rewriting.builder import Builder, user_line
from piper_ops.rewriting.refusals import REFUSALS, Refusal
from piper_ops.rewriting.replace import replace_portable
from piper_ops.written.as_written import (
    PLANNING,
    LoadedModule,
    MadeTensor,
    ModuleCall,
    RowsAt,
    as_written,
    call_of,
    tensors_in,
)
from piper_ops.written.examples import Examples
from piper_ops.written.frames import is_model_code
from piper_ops.written.opaque import Returned, backward_step, forward_step, storage_key

__all__ = [
    "DECOMPOSITIONS",
    "Float8",
    "RECIPES",
    "float8_cast",
    "float8_linear",
    "float8_mm",
    "float8_past_scale",
    "float8_scale",
    "FusionForm",
    "compiled_fusion",
    "fusion",
    "lowered",
    "Builder",
    "Examples",
    "PLANNING",
    "LoadedModule",
    "MadeTensor",
    "ModuleCall",
    "RowsAt",
    "as_written",
    "call_of",
    "tensors_in",
    "DIRECT",
    "DrawsOfCall",
    "Key",
    "key_of",
    "signed",
    "draw",
    "drawing",
    "is_draw",
    "refusal_of_draw",
    "ExpertsOverflow",
    "ANY_ROWS",
    "AXIS",
    "BODY",
    "PLACED",
    "ROUNDS",
    "WITHIN",
    "ExpertBody",
    "experts_checked",
    "experts_drop",
    "experts_further_dgrad_",
    "experts_further_wgrad_",
    "experts_give",
    "experts_home",
    "experts_return",
    "experts_return_dgrad",
    "experts_return_wgrad",
    "experts_send",
    "experts_take",
    "room_of_rounds",
    "OP_KERNELS",
    "PORTABLE",
    "BATCH_NORMS",
    "COLLECTIVE_KINDS",
    "STATISTICS",
    "BatchNorm",
    "REFUSALS",
    "Constant",
    "Formula",
    "KernelInfo",
    "Lowering",
    "PortableOp",
    "Refusal",
    "Returned",
    "UnsupportedVariant",
    "WrongCost",
    "Workspace",
    "all_gather",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "attention",
    "attention_dgrad",
    "attention_lowering",
    "attention_with_sinks",
    "backward_step",
    "batch_leaves",
    "batch_pair",
    "context_add",
    "context_add_",
    "context_merge",
    "context_take",
    "cpu_workspace",
    "is_written_on_cpu",
    "cross_entropy",
    "cross_entropy_dgrad",
    "cross_entropy_joined",
    "cross_entropy_part",
    "cross_entropy_part_dgrad",
    "cuda_workspace",
    "dtype_name",
    "embedding_part",
    "embedding_part_dgrad",
    "forward_step",
    "grouped_add",
    "grouped_add_wgrad",
    "grouped_mm",
    "grouped_mm_dgrad",
    "grouped_mm_wgrad",
    "grouped_mm_wgrad_",
    "is_model_code",
    "is_shared",
    "kernel_of",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_dgrad",
    "layer_norm_wgrad",
    "op_cost",
    "own_costs",
    "peak_bytes_inside",
    "reduce_scatter",
    "replace_portable",
    "rms_norm",
    "rms_norm_dgrad",
    "rms_norm_wgrad",
    "route",
    "route_dgrad",
    "shift",
    "shared",
    "storage_key",
    "unroute",
    "unroute_dgrad",
    "unroute_wgrad",
    "user_line",
    "wait",
]
