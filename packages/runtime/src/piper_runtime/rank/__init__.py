"""Bind a plan to one rank: its job, code, tensors and optimizer, and a closure for each instruction.

May import: data, weights.
"""

from piper_ops import Float8
from piper_runtime.rank.batches.batches import call_batch
from piper_runtime.rank.batches.feed import upload
from piper_runtime.rank.binding.evaluation import Evaluation
from piper_runtime.rank.binding.parts import Thunk
from piper_runtime.rank.binding.rank import BoundComm, BoundInstr, Rank
from piper_runtime.rank.binding.rank_state import RankJob
from piper_runtime.rank.binding.same_model import check_same_model
from piper_runtime.rank.job.job import InitialState, Job, materialize
from piper_runtime.rank.job.job_evaluation import of_loss, of_outputs
from piper_runtime.rank.job.loss_scale import LossScale
from piper_runtime.rank.job.precision import Precision
from piper_runtime.rank.optimizers.batched_muon import BatchedMuon
from piper_runtime.rank.optimizers.optimizer_groups import OptimizerSpec, optimizer_spec
from piper_runtime.rank.optimizers.optimizer_kinds import (
    KEEPS_TO,
    elementwise,
    per_parameter,
    with_declarations,
)
from piper_runtime.rank.sending.code_names import (
    Home,
    Import,
    cells,
    full_name,
    function_of,
    home_of,
    is_foreign,
    names_in,
    origin_of,
)
from piper_runtime.rank.sending.own_writes import names_of_the_process
from piper_runtime.rank.sending.shipping import RECIPE_MARK, pack
from piper_runtime.rank.values.allocator import keep_freed_memory
from piper_runtime.rank.values.code import ExportedCode, ShippedCode
from piper_runtime.rank.values.device import choose_device, default_kind, using
from piper_runtime.rank.values.rng import Draws, rng_seed

__all__ = [
    "BatchedMuon",
    "BoundComm",
    "BoundInstr",
    "Evaluation",
    "ExportedCode",
    "Home",
    "Import",
    "InitialState",
    "Job",
    "KEEPS_TO",
    "Float8",
    "LossScale",
    "OptimizerSpec",
    "Precision",
    "RECIPE_MARK",
    "Rank",
    "RankJob",
    "ShippedCode",
    "Thunk",
    "call_batch",
    "cells",
    "check_same_model",
    "choose_device",
    "default_kind",
    "elementwise",
    "full_name",
    "function_of",
    "home_of",
    "is_foreign",
    "keep_freed_memory",
    "materialize",
    "names_in",
    "names_of_the_process",
    "of_loss",
    "of_outputs",
    "optimizer_spec",
    "origin_of",
    "pack",
    "per_parameter",
    "Draws",
    "rng_seed",
    "upload",
    "using",
    "with_declarations",
]
