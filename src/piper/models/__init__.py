"""Models to plan with: GPT, Llama and a mixture of experts at any size, presets of published ones, and the job of each.

    job = piper.models.job("llama3-8b", global_batch=64)
    plan = piper.compile(job, piper.Strategy(piper.Mesh(pp=8), piper.recipes.one_f_one_b(pp=8, microbatches=32))).plan
    piper.simulate(plan, "h100x8").step_s

A size is a frozen dataclass: `dataclasses.replace(models.preset("llama3-8b"), layers=2)` is another. Nothing is allocated until a
plan is executed. The blocks are in an nn.ModuleList, so that `partition` finds them."""

from piper.models.gpt import GPT, GPTConfig
from piper.models.jobs import job, parameter_count
from piper.models.llama import Llama, LlamaConfig
from piper.models.moe import MoE, MoEConfig
from piper.models.presets import PRESETS, preset

__all__ = [
    "GPT",
    "PRESETS",
    "GPTConfig",
    "Llama",
    "LlamaConfig",
    "MoE",
    "MoEConfig",
    "job",
    "parameter_count",
    "preset",
]
