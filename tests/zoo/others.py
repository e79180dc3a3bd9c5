"""List models of torch.nn itself and of diffusers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.entries import Entry, features, without_dropout
from tests.zoo.vision import prepare

WIDTH = 16
SIZE = 16


class Attended(nn.Module):
    """nn.MultiheadAttention in a block of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class Recurrent(nn.Module):
    """A recurrent layer between two linear ones."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.recurrent = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.recurrent(self.layers[0](x))[0])


class Both(nn.Module):
    """nn.Transformer, which takes two sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Transformer(WIDTH, 2, 2, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole(x, x)


def stacked(block: Callable[[], nn.Module]) -> nn.Module:
    """Return four blocks in an nn.Sequential."""
    return nn.Sequential(*(block() for _ in range(4)))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def plain() -> Iterator[Entry]:
    """Yield models of torch.nn alone."""
    row, image = features(6, WIDTH), features(WIDTH, 8, 8)

    def blocks(*parts: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return partial(stacked, lambda: nn.Sequential(*(part() for part in parts)))

    linear, convolution = partial(nn.Linear, WIDTH, WIDTH), partial(nn.Conv2d, WIDTH, WIDTH, 3, padding=1)
    made: dict[str, tuple[Callable[[], nn.Module], Any]] = {
        "TransformerEncoder": (encoder, row),
        "Transformer": (Both, row),
        "MultiheadAttention": (partial(stacked, Attended), row),
        "LSTM": (partial(Recurrent, nn.LSTM), row),
        "GRU": (partial(Recurrent, nn.GRU), row),
        "Linear, LayerNorm, GELU": (blocks(linear, partial(nn.LayerNorm, WIDTH), nn.GELU), row),
        "Linear, RMSNorm, SiLU": (blocks(linear, partial(nn.RMSNorm, WIDTH), nn.SiLU), row),
        "Conv2d, GroupNorm, ReLU": (blocks(convolution, partial(nn.GroupNorm, 4, WIDTH), nn.ReLU), image),
        "Conv2d, InstanceNorm2d, Mish": (blocks(convolution, partial(nn.InstanceNorm2d, WIDTH), nn.Mish), image),
        "Conv2d, BatchNorm2d, ReLU": (blocks(convolution, partial(nn.BatchNorm2d, WIDTH), nn.ReLU), image),
        "Conv1d, PReLU": (blocks(partial(nn.Conv1d, 6, 6, 3, padding=1), nn.PReLU), row),
        "ConvTranspose2d, ELU": (blocks(partial(nn.ConvTranspose2d, WIDTH, WIDTH, 3, padding=1), nn.ELU), image),
    }
    for name, (make, rows) in made.items():
        yield Entry("torch.nn", name, make, rows)


def diffusers_entries() -> Iterator[Entry]:
    """Yield models that take noisy samples, times, and texts."""

    def sample(generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"sample": torch.randn(4, SIZE, SIZE, generator=generator), "timestep": torch.randint(99, (), generator=generator)}

    def described(generator: torch.Generator, name: str = "sample") -> dict[str, torch.Tensor]:
        found = sample(generator)
        found[name] = found.pop("sample")
        return {**found, "encoder_hidden_states": torch.randn(5, WIDTH, generator=generator)}

    channels: dict[str, Any] = {"in_channels": 4, "out_channels": 4, "norm_num_groups": 4}
    two: dict[str, Any] = {**channels, "sample_size": SIZE, "block_out_channels": (8, 16), "layers_per_block": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8}
    yield diffused("UNet2DModel", sample, two | {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2})
    conditioned = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    yield diffused("UNet2DConditionModel", described, two | conditioned | {"cross_attention_dim": WIDTH, "attention_head_dim": 4})
    image = features(4, SIZE, SIZE)
    decoded = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2, "latent_channels": 2}
    yield diffused("VQModel", image, two | decoded)
    tiny = {f"{side}_block_out_channels": (8, 8) for side in ("encoder", "decoder")}
    tiny |= {"num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)}
    yield diffused("AutoencoderTiny", features(3, SIZE, SIZE), {**tiny, "latent_channels": 2, "upsampling_scaling_factor": 2})
    patches: dict[str, Any] = {
        **heads,
        "num_layers": 2,
        "sample_size": SIZE,
        "patch_size": 4,
        "in_channels": 4,
        "out_channels": 4,
    }

    def labelled(generator: torch.Generator) -> dict[str, torch.Tensor]:
        found = sample(generator)
        return {
            "hidden_states": found["sample"],
            "timestep": found["timestep"],
            "class_labels": torch.randint(5, (), generator=generator),
        }

    yield diffused("DiTTransformer2DModel", labelled, patches | {"norm_num_groups": 4, "num_embeds_ada_norm": 100})

    def pooled(generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {**described(generator, "hidden_states"), "pooled_projections": torch.randn(WIDTH, generator=generator)}

    joint = patches | {
        "joint_attention_dim": WIDTH,
        "caption_projection_dim": 16,
        "pooled_projection_dim": WIDTH,
        "pos_embed_max_size": 8,
    }
    yield diffused("SD3Transformer2DModel", pooled, joint)


def diffused(name: str, row: Callable[[torch.Generator], Any], options: dict[str, Any]) -> Entry:
    """Return an entry for a model of diffusers."""

    def made() -> nn.Module:
        prepare()
        import diffusers

        return without_dropout(getattr(diffusers, name)(**options).train())

    return Entry("diffusers", name, made, row)


def entries() -> Iterator[Entry]:
    yield from plain()
    yield from diffusers_entries()
