"""List models of torchvision and timm: shrunken where their constructors allow it, else the smallest of a family."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.entries import Entry, images, without_dropout

TORCHVISION: dict[str, tuple[int, dict[str, Any]]] = {
    **dict.fromkeys(
        ("resnet18", "resnext50_32x4d", "wide_resnet50_2", "densenet121", "mobilenet_v2", "mobilenet_v3_small"), (32, {})
    ),
    **dict.fromkeys(("mnasnet0_5", "shufflenet_v2_x0_5", "regnet_x_400mf", "regnet_y_400mf", "efficientnet_b0"), (32, {})),
    **dict.fromkeys(("convnext_tiny", "swin_t", "swin_v2_t"), (32, {})),
    **dict.fromkeys(("vgg11", "squeezenet1_0"), (64, {})),
    "googlenet": (64, {"aux_logits": False, "init_weights": False}),
    "alexnet": (64, {}),
    "vgg11_bn": (32, {}),
    "efficientnet_v2_s": (32, {}),
}
"""Name -> size of an image, arguments."""

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    **dict.fromkeys(("vit_tiny_patch16_224", "deit_tiny_patch16_224", "beit_base_patch16_224", "cait_xxs24_224"), (32, VIT)),
    **dict.fromkeys(("eva02_tiny_patch14_224", "deit3_small_patch16_224", "vit_base_patch16_clip_224"), (32, VIT)),
    **dict.fromkeys(("vit_small_patch16_rope_224", "vit_relpos_small_patch16_224", "xcit_nano_12_p16_224"), (32, VIT)),
    **dict.fromkeys(
        ("mixer_s16_224", "gmlp_ti16_224", "resmlp_12_224"),
        (32, {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_blocks": 2}),
    ),
    **dict.fromkeys(("convnext_atto", "convnextv2_atto"), (32, {"dims": (8, 8, 16, 16), "depths": (1, 1, 2, 1)})),
    "swin_tiny_patch4_window7_224": (
        32,
        {"img_size": 32, "window_size": 4, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2)},
    ),
    "swinv2_tiny_window8_256": (32, {"img_size": 32, "window_size": 4, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2)}),
    "poolformer_s12": (32, {"dims": (8, 8, 16, 16), "layers": (1, 1, 2, 1)}),
    "caformer_s18": (32, {"dims": (8, 8, 32, 32), "depths": (1, 1, 2, 1)}),
    "convmixer_768_32": (32, {"dim": 16, "depth": 4}),
    "twins_svt_small": (64, {"img_size": 64}),
    "pit_ti_224": (64, {"img_size": 64}),
    "hiera_tiny_224": (64, {"img_size": 64}),
    "mvitv2_tiny": (64, {"img_size": 64}),
    "davit_tiny": (64, {}),
    "focalnet_tiny_srf": (64, {}),
    "edgenext_xx_small": (64, {}),
    "visformer_tiny": (64, {"img_size": 64}),
    "levit_128s": (224, {}),
    "mobilevit_xxs": (64, {}),
    "mobilevitv2_050": (64, {}),
    "efficientformer_l1": (224, {}),
    "fastvit_t8": (64, {}),
    "repvit_m0_9": (64, {}),
    "tiny_vit_5m_224": (64, {"img_size": 64}),
    "maxvit_rmlp_pico_rw_256": (64, {"img_size": 64}),
    "coatnet_pico_rw_224": (64, {"img_size": 64}),
    "nfnet_f0": (64, {}),
    "ghostnet_050": (64, {}),
    "rexnet_100": (64, {}),
    "regnetx_002": (64, {}),
    "hrnet_w18_small": (64, {}),
    "res2net50_26w_4s": (64, {}),
    "volo_d1_224": (64, {"img_size": 64}),
    "crossvit_tiny_240": (240, {}),
    "sequencer2d_s": (224, {}),
}
"""Likewise."""


def entries() -> Iterator[Entry]:
    """Yield the models of timm first; those of torchvision follow."""
    yield Entry("torchvision", "vit_b_16", small_vit, images(32))
    for name, (size, options) in TIMM.items():
        yield Entry("timm", name, partial(of_timm, name, options), images(size))
    for name, (size, options) in TORCHVISION.items():
        yield Entry("torchvision", name, partial(of_torchvision, name, options), images(size))


def prepare() -> None:
    """Declare torchvision's operators where its library in C++, which is made for CUDA, does not load; no model here has them."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")


def of_timm(name: str, options: dict[str, Any]) -> nn.Module:
    prepare()
    import timm

    return without_dropout(timm.create_model(name, pretrained=False, **{"num_classes": 5, **options}).train())


def of_torchvision(name: str, options: dict[str, Any]) -> nn.Module:
    prepare()
    import torchvision

    return without_dropout(torchvision.models.get_model(name, weights=None, num_classes=5, **options).train())


def small_vit() -> nn.Module:
    prepare()
    from torchvision.models import VisionTransformer

    return without_dropout(VisionTransformer(32, 8, 2, 2, 32, 48, num_classes=5).train())
