"""Provide decoders to plan with: dense ones and mixtures of experts of any size, each by one description.

There are presets of published ones, and a job for each. A description is a frozen dataclass:
`dataclasses.replace(models.preset("llama3-8b"), layers=2)` is another. Nothing is allocated until a plan is executed.
The blocks are in an nn.ModuleList, so that `partition` finds them. This room may import `piper_ir`, `piper_ops` and
`piper_runtime`, and no other room of `piper`.
"""

from piper.models.decoder import Decoder, DecoderConfig
from piper.models.decoder_config import Experts, Latent
from piper.models.decoder_kinds import BERTConfig, GPTConfig, LlamaConfig, MoEConfig
from piper.models.families import hugging_face
from piper.models.jobs import job, parameter_count
from piper.models.presets import PRESETS, preset
from piper_runtime.weights import Into

__all__ = [
    "PRESETS",
    "BERTConfig",
    "Decoder",
    "DecoderConfig",
    "Experts",
    "GPTConfig",
    "Into",
    "Latent",
    "LlamaConfig",
    "MoEConfig",
    "hugging_face",
    "job",
    "parameter_count",
    "preset",
]
