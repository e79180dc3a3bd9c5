"""List models of transformers that take sounds, films, time series, or several of those with texts and images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.entries import Entry, Rows
from tests.zoo.hugging_face import LENGTH, SIZE, VOCAB, made

Drawn = Callable[[torch.Generator], Tensor]
"""A function that draws one field of a row."""
Kinds = list[tuple[str, str, Rows, dict[str, Any]]]
"""Models by type, class, rows, and further fields of their configurations."""

SAMPLES, FRAMES, BANDS = 400, 32, 8
PATCHES = 16
"""The patches of an image of SIZE pixels, of 8 pixels each."""
IMAGE_TOKEN = 63
"""The word in whose place an image is put."""


def integers(below: int, *shape: int) -> Drawn:
    return lambda generator: torch.randint(2, below, shape, generator=generator)


def numbers(*shape: int) -> Drawn:
    return lambda generator: torch.randn(*shape, generator=generator)


def one_of(count: int) -> Drawn:
    return lambda generator: torch.randint(count, (), generator=generator)


def fixed(value: Tensor) -> Drawn:
    return lambda generator: value.clone()


def behind_images(places: int) -> Drawn:
    """Return words behind so many places for parts of an image."""
    words = integers(VOCAB - 2, LENGTH)
    return lambda generator: torch.cat([torch.full((places,), IMAGE_TOKEN), words(generator)])


def row_of(**fields: Drawn) -> Rows:
    """Return rows that are dicts, drawn field by field."""
    return lambda generator: {name: draw(generator) for name, draw in fields.items()}


WORDS, WAVE, SPECTRUM, SPOKEN = (
    integers(VOCAB, LENGTH),
    numbers(SAMPLES),
    numbers(FRAMES, BANDS),
    integers(VOCAB, 6),
)
IMAGE, FILM, CLASS = numbers(3, SIZE, SIZE), numbers(2, 3, SIZE, SIZE), one_of(5)
DATED = row_of(
    past_values=numbers(14),
    past_time_features=numbers(14, 1),
    past_observed_mask=fixed(torch.ones(14)),
    future_values=numbers(4),
    future_time_features=numbers(4, 1),
)
FORECAST = row_of(past_values=numbers(16, 3), future_values=numbers(4, 3))
HEARD: dict[str, Any] = {
    "conv_dim": (8, 8),
    "conv_stride": (8, 4),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "num_adapter_layers": 1,
}
"""The convolutions that listen, small."""
SPECTRAL = {
    "feature_projection_input_dim": BANDS,
    "apply_spec_augment": False,
    "add_adapter": False,
}
SERIES: dict[str, Any] = {
    "prediction_length": 4,
    "context_length": 12,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
}
CHANNELS = {
    "num_input_channels": 3,
    "context_length": 16,
    "prediction_length": 4,
    "patch_length": 4,
    "patch_stride": 4,
}
RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
}
DETECTION = {
    "num_queries": 4,
    "use_timm_backbone": False,
    "backbone": None,
    "use_pretrained_backbone": False,
}
DECODING = {
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 2,
    "decoder_intermediate_size": 16,
}

SPEECH = {
    "wav2vec2": "Wav2Vec2",
    "hubert": "Hubert",
    "wavlm": "WavLM",
    "data2vec-audio": "Data2VecAudio",
    "sew": "SEW",
    "sew-d": "SEWD",
    "unispeech": "UniSpeech",
    "unispeech-sat": "UniSpeechSat",
    "wav2vec2-conformer": "Wav2Vec2Conformer",
}
FILMS: dict[str, tuple[str, dict[str, Any]]] = {
    "timesformer": ("Timesformer", {}),
    "videomae": ("VideoMAE", {}),
    "vivit": ("Vivit", {"tubelet_size": [2, 8, 8]}),
}
FORECASTERS = {"informer": "Informer", "time_series_transformer": "TimeSeriesTransformer"}


def with_losses() -> Kinds:
    """Return models that compute their loss themselves."""
    seen = row_of(
        input_ids=behind_images(4), pixel_values=IMAGE, labels=integers(VOCAB, 4 + LENGTH)
    )
    first = fixed(torch.cat([torch.ones(4), torch.zeros(LENGTH)]).long())
    told = row_of(
        input_ids=behind_images(4),
        pixel_values=IMAGE,
        labels=integers(VOCAB, 4 + LENGTH),
        token_type_ids=first,
    )
    many = row_of(
        input_ids=behind_images(PATCHES),
        pixel_values=IMAGE,
        labels=integers(VOCAB, PATCHES + LENGTH),
    )
    after = fixed(torch.cat([torch.zeros(PATCHES), torch.ones(LENGTH)]).long())
    pali = row_of(
        input_ids=behind_images(PATCHES),
        pixel_values=IMAGE,
        labels=integers(VOCAB, PATCHES + LENGTH),
        token_type_ids=after,
    )
    tiles = row_of(
        input_ids=behind_images(4),
        pixel_values=numbers(1, 3, SIZE, SIZE),
        labels=integers(VOCAB, 4 + LENGTH),
    )
    page = row_of(
        input_ids=WORDS,
        bbox=integers(50, LENGTH, 4),
        pixel_values=IMAGE,
        labels=integers(5, LENGTH),
    )
    heard, spectrum = (
        row_of(input_values=WAVE, labels=CLASS),
        row_of(input_features=SPECTRUM, labels=CLASS),
    )
    bands = {
        "input_feat_per_channel": BANDS,
        "conv_channels": 16,
        "conv_kernel_sizes": [3, 3],
        "max_source_positions": FRAMES,
    }
    image = {
        "max_length": FRAMES,
        "num_mel_bins": BANDS,
        "frequency_stride": 4,
        "time_stride": 4,
        "patch_size": 4,
    }
    letters = {"local_transformer_stride": 8, "downsampling_rate": 2, "num_hash_buckets": 64}
    spoken = row_of(input_values=WAVE, labels=SPOKEN)
    return [
        *(
            (kind, f"{name}ForSequenceClassification", heard, HEARD)
            for kind, name in SPEECH.items()
        ),
        ("wav2vec2-bert", "Wav2Vec2BertForSequenceClassification", spectrum, SPECTRAL),
        ("wav2vec2", "Wav2Vec2ForCTC", spoken, HEARD),
        (
            "whisper",
            "WhisperForConditionalGeneration",
            row_of(input_features=numbers(BANDS, FRAMES), labels=SPOKEN),
            {"num_mel_bins": BANDS, "max_source_positions": FRAMES // 2},
        ),
        (
            "speech_to_text",
            "Speech2TextForConditionalGeneration",
            row_of(input_features=SPECTRUM, labels=SPOKEN),
            bands,
        ),
        (
            "speecht5",
            "SpeechT5ForSpeechToText",
            spoken,
            {**HEARD, "encoder_layers": 2, "decoder_layers": 2},
        ),
        (
            "audio-spectrogram-transformer",
            "ASTForAudioClassification",
            row_of(input_values=SPECTRUM, labels=CLASS),
            image,
        ),
        (
            "moonshine",
            "MoonshineForConditionalGeneration",
            row_of(input_values=numbers(2000), labels=SPOKEN),
            {},
        ),
        *(
            (
                kind,
                f"{name}ForVideoClassification",
                row_of(pixel_values=FILM, labels=CLASS),
                {"num_frames": 2, **more},
            )
            for kind, (name, more) in FILMS.items()
        ),
        (
            "segformer",
            "SegformerForSemanticSegmentation",
            row_of(pixel_values=IMAGE, labels=integers(5, SIZE, SIZE)),
            {},
        ),
        (
            "vit_mae",
            "ViTMAEForPreTraining",
            row_of(pixel_values=IMAGE, noise=numbers(PATCHES)),
            DECODING,
        ),
        ("llava", "LlavaForConditionalGeneration", many, {"image_token_index": IMAGE_TOKEN}),
        (
            "gemma3",
            "Gemma3ForConditionalGeneration",
            told,
            {"image_token_index": IMAGE_TOKEN, "mm_tokens_per_image": 4},
        ),
        (
            "paligemma",
            "PaliGemmaForConditionalGeneration",
            pali,
            {"image_token_id": IMAGE_TOKEN, "projection_dim": 32},
        ),
        (
            "idefics3",
            "Idefics3ForConditionalGeneration",
            tiles,
            {"image_token_id": IMAGE_TOKEN, "scale_factor": 2},
        ),
        (
            "blip-2",
            "Blip2ForConditionalGeneration",
            seen,
            {"num_query_tokens": 4, "image_token_index": IMAGE_TOKEN},
        ),
        ("git", "GitForCausalLM", row_of(input_ids=WORDS, pixel_values=IMAGE, labels=WORDS), {}),
        *(
            (
                f"{kind}",
                f"{name}ForConditionalGeneration",
                row_of(input_ids=WORDS, labels=WORDS),
                {},
            )
            for kind, name in QWEN.items()
        ),
        ("vilt", "ViltForMaskedLM", row_of(input_ids=WORDS, pixel_values=IMAGE, labels=WORDS), {}),
        (
            "layoutlmv3",
            "LayoutLMv3ForTokenClassification",
            page,
            {"input_size": SIZE, "coordinate_size": 5, "shape_size": 6},
        ),
        (
            "canine",
            "CanineForSequenceClassification",
            row_of(input_ids=integers(VOCAB, 32), labels=CLASS),
            letters,
        ),
        ("patchtst", "PatchTSTForPrediction", FORECAST, {**CHANNELS, "do_mask_input": False}),
        ("patchtsmixer", "PatchTSMixerForPrediction", FORECAST, CHANNELS),
        *((kind, f"{name}ForPrediction", DATED, SERIES) for kind, name in FORECASTERS.items()),
    ]


QWEN = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}


def without_losses() -> Kinds:
    """Return models whose output is judged."""
    image, words = row_of(pixel_values=IMAGE), row_of(input_ids=WORDS)
    played = row_of(
        states=numbers(6, 17),
        actions=numbers(6, 4),
        rewards=numbers(6, 1),
        returns_to_go=numbers(6, 1),
        timesteps=integers(50, 6),
        attention_mask=fixed(torch.ones(6)),
    )
    shown = row_of(
        input_ids=WORDS, visual_embeds=numbers(4, 16), visual_attention_mask=fixed(torch.ones(4))
    )
    found = row_of(input_ids=WORDS, visual_feats=numbers(4, 16), visual_pos=numbers(4, 4))
    cells = row_of(
        input_ids=WORDS,
        token_type_ids=lambda generator: torch.randint(2, (LENGTH, 7), generator=generator),
    )
    crossed = {"visual_feat_dim": 16, "l_layers": 2, "r_layers": 2, "x_layers": 2}
    return [
        ("decision_transformer", "DecisionTransformerModel", played, {}),
        ("dinov3_vit", "DINOv3ViTModel", image, {}),
        (
            "dinov3_convnext",
            "DINOv3ConvNextModel",
            image,
            {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1]},
        ),
        (
            "yolos",
            "YolosForObjectDetection",
            image,
            {"image_size": [SIZE, SIZE], "num_detection_tokens": 4},
        ),
        (
            "detr",
            "DetrForObjectDetection",
            image,
            {**DETECTION, "backbone_config": {**RESNET, "out_features": ["stage2"]}},
        ),
        ("siglip_vision_model", "SiglipVisionModel", image, {}),
        ("clip_vision_model", "CLIPVisionModel", image, {}),
        ("clip_text_model", "CLIPTextModel", words, {}),
        ("clip", "CLIPModel", row_of(input_ids=WORDS, pixel_values=IMAGE), {}),
        ("visual_bert", "VisualBertModel", shown, {"visual_embedding_dim": 16}),
        ("lxmert", "LxmertModel", found, crossed),
        ("tapas", "TapasModel", cells, {}),
    ]


def entries() -> Iterator[Entry]:
    """Yield the models by type and class."""
    for own_loss, kinds in ((True, with_losses()), (False, without_losses())):
        for kind, name, row, more in kinds:
            make = partial(made, kind, name, **more)
            entry = Entry("transformers", f"{kind}/{name}", make, row, own_loss)
            if kind == "blip-2":
                entry = replace(entry, make=partial(woken, make))
            yield (
                replace(entry, params="float32") if kind == "canine" else entry
            )  # plain PyTorch's loss is nan in float64


def woken(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model whose queries are drawn: they begin as zeros, with which most gradients are zero."""
    model: Any = make()
    nn.init.normal_(model.query_tokens)
    result: nn.Module = model
    return result
