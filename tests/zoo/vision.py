"""List models of torchvision and timm: shrunken where their constructors allow it, else the smallest of a family."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.zoo.entries import Entry, images, without_dropout

Options = dict[str, Any]

TORCHVISION: dict[str, tuple[int, Options]] = {
    **dict.fromkeys(("resnet18", "squeezenet1_1", "alexnet"), (64, {})),
    "convnext_tiny": (32, {}),
    "shufflenet_v2_x0_5": (64, {}),
    "mobilenet_v2": (
        64,
        {"inverted_residual_setting": [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 2, 1]]},
    ),
    "googlenet": (64, {"aux_logits": False, "init_weights": False}),
    "mnasnet0_5": (64, {}),
    "mobilenet_v3_small": (64, {}),
    "regnet_y_400mf": (64, {}),
    "efficientnet_b0": (64, {}),
}
"""Name -> size of an image, arguments."""

STAGES: Options = {"dims": (8, 8, 16, 16), "depths": (1, 1, 2, 1)}
SPREAD: Options = {"embed_dims": (8, 8, 16, 16), "depths": (1, 1, 2, 1)}
VIT: Options = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
MIXER: Options = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_blocks": 2}
SWIN: Options = {
    "img_size": 32,
    "window_size": 4,
    "embed_dim": 8,
    "depths": (2, 2),
    "num_heads": (2, 2),
}
TIMM: dict[str, tuple[int, Options]] = {
    **dict.fromkeys(
        (
            "vit_tiny_patch16_224",
            "deit_tiny_patch16_224",
            "beit_base_patch16_224",
            "cait_xxs24_224",
        ),
        (32, VIT),
    ),
    **dict.fromkeys(
        ("eva02_tiny_patch14_224", "deit3_small_patch16_224", "vit_base_patch16_clip_224"),
        (32, VIT),
    ),
    **dict.fromkeys(
        ("vit_small_patch16_rope_224", "vit_relpos_small_patch16_224", "xcit_nano_12_p16_224"),
        (32, VIT),
    ),
    **dict.fromkeys(("mixer_s16_224", "gmlp_ti16_224", "resmlp_12_224"), (32, MIXER)),
    **dict.fromkeys(("convnext_atto", "convnextv2_atto", "poolformer_s12"), (64, STAGES)),
    **dict.fromkeys(("caformer_s18", "mambaout_femto"), (64, {**STAGES, "dims": (32, 32, 32, 32)})),
    "inception_next_atto": (64, {**STAGES, "dims": (32, 32, 32, 32), "ls_init_value": 0.5}),
    **dict.fromkeys(("swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"), (32, SWIN)),
    "convmixer_768_32": (32, {"dim": 16, "depth": 4}),
    "convit_tiny": (
        32,
        {"img_size": 32, "patch_size": 8, "embed_dim": 8, "depth": 3, "local_up_to_layer": 2},
    ),
    "pvt_v2_b0": (64, {**SPREAD, "num_heads": (1, 2, 2, 2)}),
    "davit_tiny": (64, {**SPREAD, "num_heads": (1, 2, 2, 2)}),
    "focalnet_tiny_srf": (64, {"embed_dim": 8, "depths": (1, 1, 2, 1)}),
    "edgenext_xx_small": (64, {"dims": (8, 8, 16, 16), "depths": (2, 2, 2, 2)}),
    "visformer_tiny": (
        64,
        {"img_size": 64, "init_channels": 8, "embed_dim": 24, "depth": (2, 2, 2)},
    ),
    "levit_128s": (
        64,
        {"img_size": 64, "embed_dim": (16, 24, 32), "depth": (1, 2, 1), "num_heads": (2, 2, 2)},
    ),
    "starnet_s1": (64, {"base_dim": 8, "depths": (1, 1, 2, 1)}),
    "efficientformer_l1": (224, SPREAD),
    "fastvit_t8": (64, {"embed_dims": (8, 8, 16, 16), "layers": (1, 1, 2, 1)}),
    "repvit_m0_9": (64, {"embed_dim": (8, 8, 16, 16), "depth": (1, 1, 2, 1)}),
    "densenet121": (64, {"growth_rate": 4, "block_config": (2, 2, 2)}),
    "resnetv2_50": (64, {"layers": (1, 1, 2, 1), "channels": (16, 16, 32, 32), "stem_chs": 8}),
    "dla34": (64, {"levels": (1, 1, 1, 1, 1, 1), "channels": (4, 4, 8, 8, 16, 16)}),
    "coat_tiny": (
        64,
        {"img_size": 64, "embed_dims": (64,) * 4, "serial_depths": (1,) * 4, "parallel_depth": 1},
    ),
    "tiny_vit_5m_224": (
        64,
        {"embed_dims": (8, 8, 16, 16), "num_heads": (1, 2, 2, 2), "window_sizes": (4, 4, 4, 2)},
    ),
    "fasternet_t0": (64, {"embed_dim": 8, "depths": (1, 1, 2, 1), "feature_dim": 16}),
    "gcvit_xxtiny": (
        64,
        {"img_size": 64, "embed_dim": 8, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 2, 2)},
    ),
    "nest_tiny": (
        64,
        {"img_size": 64, "embed_dims": (8, 8, 16), "num_heads": (1, 2, 2), "depths": (1, 1, 2)},
    ),
    "shvit_s1": (64, {"embed_dim": (16, 24, 32), "depth": (1, 1, 2), "partial_dim": (8, 8, 8)}),
    "swiftformer_xs": (64, {"embed_dims": (8, 8, 16, 16), "layers": (1, 1, 2, 1)}),
    "resnet18": (64, {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16)}),
    "tnt_s_legacy_patch16_224": (
        32,
        {"img_size": 32, "embed_dim": 32, "inner_dim": 8, "depth": 2, "num_heads_outer": 2},
    ),
    "mobilevit_xxs": (64, {}),
    "ghostnet_050": (64, {}),
    "regnetx_002": (64, {}),
    "rexnet_100": (64, {}),
    "twins_svt_small": (64, {"img_size": 64}),
    "pit_ti_224": (64, {"img_size": 64}),
    "hiera_tiny_224": (64, {"img_size": 64}),
    "mvitv2_tiny": (64, {"img_size": 64}),
    "volo_d1_224": (64, {"img_size": 64}),
    "coatnet_pico_rw_224": (64, {"img_size": 64}),
    "maxvit_rmlp_pico_rw_256": (64, {"img_size": 64}),
    "res2net50_26w_4s": (64, {"layers": (1, 1, 1, 1)}),
    "hrnet_w18_small": (64, {}),
    "sequencer2d_s": (64, {"img_size": 64}),
}
"""Likewise; the options replace those of the name, too."""


def entries() -> Iterator[Entry]:
    """Yield models of timm, the shrunken ones first; those of torchvision follow."""
    yield Entry("torchvision", "vit_b_16", small_vit, images(32))
    few = [name for name, (_, options) in TIMM.items() if options and options != {"img_size": 64}]
    for name in [*few, *(name for name in TIMM if name not in few)]:
        size, options = TIMM[name]
        yield Entry("timm", name, partial(of_timm, name, options), images(size))
    for name, (size, options) in TORCHVISION.items():
        yield Entry("torchvision", name, partial(of_torchvision, name, options), images(size))


def prepare() -> None:
    """Declare torchvision's operators where its library in C++, which is made for CUDA, does not load; no model here
    has them."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(
                f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor"
            )


def of_timm(name: str, options: Options) -> nn.Module:
    """Return a model of timm: as `create_model` makes it, but for the options, which its function may have given
    itself."""
    prepare()
    import timm

    module: Any = sys.modules[timm.models.model_entrypoint(name).__module__]
    build = module.build_model_with_cfg

    def shrunken(made: Any, variant: str, pretrained: bool = False, **arguments: Any) -> nn.Module:
        model: nn.Module = build(made, variant, pretrained, **{**arguments, **options})
        return model

    with mock.patch.object(module, "build_model_with_cfg", shrunken):
        return without_dropout(timm.create_model(name, pretrained=False, num_classes=5).train())


def of_torchvision(name: str, options: dict[str, Any]) -> nn.Module:
    prepare()
    import torchvision

    return without_dropout(
        torchvision.models.get_model(name, weights=None, num_classes=5, **options).train()
    )


def small_vit() -> nn.Module:
    prepare()
    from torchvision.models import VisionTransformer

    return without_dropout(VisionTransformer(32, 8, 2, 2, 32, 48, num_classes=5).train())
