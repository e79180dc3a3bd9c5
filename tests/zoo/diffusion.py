"""List models of diffusers, which take noisy samples, times, and texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tests.zoo.entries import Entry, Rows, features, without_dropout
from tests.zoo.vision import prepare

WIDTH = 16
SIZE = 16
WORDS = (5, WIDTH)
"""The shape of an embedded text."""
LATENT = (4, SIZE, SIZE)
TIMES = 99

CHANNELS: dict[str, Any] = {"in_channels": 4, "out_channels": 4, "norm_num_groups": 4}
TWO: dict[str, Any] = {
    **CHANNELS,
    "sample_size": SIZE,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
}
DECODED = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "latent_channels": 2,
}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
PATCHES: dict[str, Any] = {
    **HEADS,
    "sample_size": SIZE,
    "patch_size": 4,
    "in_channels": 4,
    "out_channels": 4,
}
JOINT: dict[str, Any] = {
    "joint_attention_dim": WIDTH,
    "caption_projection_dim": 16,
    "pos_embed_max_size": 64,
}


def row_of(**fields: tuple[int, ...] | int) -> Rows:
    """Return rows that are dicts: numbers of a shape, or an integer below a bound."""

    def row(generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {
            name: torch.randint(size, (), generator=generator)
            if isinstance(size, int)
            else torch.randn(*size, generator=generator)
            for name, size in fields.items()
        }

    return row


class Placed(nn.Module):
    """A transformer of Flux's kind, with the places of patches and words, which all rows share."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer
        self.register_buffer(
            "patches", torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))
        )
        self.register_buffer("words", torch.zeros(WORDS[0], 3))

    def forward(self, **given: torch.Tensor) -> Any:
        return self.transformer(**given, img_ids=self.patches, txt_ids=self.words)


def entries() -> Iterator[Entry]:
    """Yield models of images and of films."""
    text: dict[str, Any] = {"encoder_hidden_states": WORDS, "timestep": TIMES}
    plain = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    yield diffused("UNet2DModel", row_of(sample=LATENT, timestep=TIMES), TWO | plain)
    attending = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": WIDTH,
        "attention_head_dim": 4,
    }
    yield diffused("UNet2DConditionModel", row_of(sample=LATENT, **text), TWO | attending)
    yield diffused("VQModel", features(*LATENT), TWO | DECODED)
    yield diffused("AutoencoderKL", features(*LATENT), TWO | DECODED)
    tiny: dict[str, Any] = {f"{side}_block_out_channels": (8, 8) for side in ("encoder", "decoder")}
    tiny |= {
        "num_encoder_blocks": (1, 1),
        "num_decoder_blocks": (1, 1),
        "latent_channels": 2,
        "upsampling_scaling_factor": 2,
    }
    yield replace(diffused("AutoencoderTiny", features(3, SIZE, SIZE), tiny), params="float32")
    labelled = row_of(hidden_states=LATENT, timestep=TIMES, class_labels=5)
    yield diffused(
        "DiTTransformer2DModel",
        labelled,
        PATCHES | {"norm_num_groups": 4, "num_embeds_ada_norm": 100},
    )
    pooled = row_of(hidden_states=LATENT, pooled_projections=(WIDTH,), **text)
    yield diffused(
        "SD3Transformer2DModel", pooled, PATCHES | JOINT | {"pooled_projection_dim": WIDTH}
    )
    captioned = {
        "cross_attention_dim": WIDTH,
        "caption_channels": WIDTH,
        "norm_num_groups": 4,
        "out_channels": 8,
    }
    yield diffused(
        "PixArtTransformer2DModel", row_of(hidden_states=LATENT, **text), PATCHES | captioned
    )
    layers = {"num_mmdit_layers": 1, "num_single_dit_layers": 1}
    aura = {name: value for name, value in (PATCHES | JOINT).items() if name != "num_layers"}
    yield diffused(
        "AuraFlowTransformer2DModel", row_of(hidden_states=LATENT, **text), aura | layers
    )
    crossing = {
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 8,
        "cross_attention_dim": WIDTH,
    }
    yield diffused(
        "SanaTransformer2DModel",
        row_of(hidden_states=LATENT, **text),
        PATCHES | crossing | {"caption_channels": WIDTH},
    )
    prior = {"embedding_dim": WIDTH, "num_embeddings": 5, "additional_embeddings": 4}
    known = row_of(hidden_states=(WIDTH,), proj_embedding=(WIDTH,), **text)
    yield diffused("PriorTransformer", known, HEADS | prior)
    film = row_of(hidden_states=(4, 2, 8, 8), **text)
    wan = HEADS | {
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": WIDTH,
        "freq_dim": 8,
        "ffn_dim": 32,
        "rope_max_seq_len": 32,
    }
    yield diffused("WanTransformer3DModel", film, wan)
    frames = {
        "sample_width": 8,
        "sample_height": 8,
        "sample_frames": 5,
        "text_embed_dim": WIDTH,
        "max_text_seq_length": 5,
    }
    cog = HEADS | frames | {"in_channels": 4, "out_channels": 4, "time_embed_dim": 8}
    yield diffused("CogVideoXTransformer3DModel", row_of(hidden_states=(2, 4, 8, 8), **text), cog)
    flux = HEADS | {
        "in_channels": 4,
        "num_single_layers": 1,
        "joint_attention_dim": WIDTH,
        "axes_dims_rope": (4, 2, 2),
    }
    flux |= {"pooled_projection_dim": WIDTH, "patch_size": 1, "num_layers": 1}
    tokens = row_of(hidden_states=(16, 4), pooled_projections=(WIDTH,), **text)
    yield diffused("FluxTransformer2DModel", tokens, flux, placed=True)


def diffused(name: str, row: Rows, options: dict[str, Any], *, placed: bool = False) -> Entry:
    """Return an entry for a model of diffusers."""

    def made() -> nn.Module:
        prepare()
        import diffusers

        model: nn.Module = without_dropout(getattr(diffusers, name)(**options).train())
        return Placed(model) if placed else model

    return Entry("diffusers", name, made, row)
