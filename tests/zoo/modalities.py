"""List models of transformers that take sounds, films, time series, or several of those with texts and images."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.zoo.entries import Entry, Rows
from tests.zoo.hugging_face import LENGTH, SIZE, VOCAB, made

SAMPLES, FRAMES, BANDS = 400, 32, 8
IMAGE_TOKEN = 63
"""The word in whose place an image is put."""
PATCHES = 16
"""The patches of an image of SIZE pixels, of 8 pixels each."""

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
"""A convolution of sound by small strides."""
SERIES: dict[str, Any] = {"prediction_length": 4, "context_length": 12, "lags_sequence": [1, 2], "num_time_features": 1}
PIXELS = (3, SIZE, SIZE)
WAVE, SPECTRUM, WORDS = (SAMPLES,), (FRAMES, BANDS), (VOCAB, LENGTH)
CLASS = (5,)
SPEECH: dict[str, Any] = {"labels": (VOCAB, 6)}
PAST: dict[str, Any] = {"past_values": (16, 3)}
DATED = {"past_values": (14.0,), "past_time_features": (14.0, 1), "past_observed_mask": 14, "future_values": (4.0,)}


def integers(below: int, *shape: int) -> Any:
    return lambda generator: torch.randint(2, below, shape, generator=generator)


def numbers(*shape: int) -> Any:
    return lambda generator: torch.randn(*shape, generator=generator)


def of_class(count: int = 5) -> Any:
    return lambda generator: torch.randint(count, (), generator=generator)


def ones(*shape: int) -> Any:
    return lambda generator: torch.ones(*shape)


def always(*values: Any) -> Any:
    return lambda generator: torch.tensor(values if len(values) > 1 else values[0])


def seen_words(images: int) -> Any:
    """Return words that begin with so many places of an image."""
    words = integers(VOCAB - 2, LENGTH)
    return lambda generator: torch.cat([torch.full((images,), IMAGE_TOKEN), words(generator)])


def row_of(**fields: Any) -> Rows:
    """Return rows that are dicts, drawn field by field."""
    return lambda generator: {name: draw(generator) for name, draw in fields.items()}


words, image, wave = integers(VOCAB, LENGTH), numbers(*PIXELS), numbers(SAMPLES)
spectrum, spoken = numbers(FRAMES, BANDS), integers(VOCAB, 6)
film = numbers(2, *PIXELS)
dated = {
    "past_values": numbers(14),
    "past_time_features": numbers(14, 1),
    "past_observed_mask": ones(14),
    "future_values": numbers(4),
    "future_time_features": numbers(4, 1),
}
LABELLED: list[tuple[str, str, Rows, dict[str, Any]]] = [
    *(
        (kind, f"{name}ForSequenceClassification", row_of(input_values=wave, labels=of_class()), HEARD)
        for kind, name in {
            "wav2vec2": "Wav2Vec2",
            "hubert": "Hubert",
            "wavlm": "WavLM",
            "data2vec-audio": "Data2VecAudio",
            "sew": "SEW",
            "sew-d": "SEWD",
            "unispeech": "UniSpeech",
            "unispeech-sat": "UniSpeechSat",
            "wav2vec2-conformer": "Wav2Vec2Conformer",
        }.items()
    ),
    (
        "wav2vec2-bert",
        "Wav2Vec2BertForSequenceClassification",
        row_of(input_features=spectrum, labels=of_class()),
        {"feature_projection_input_dim": BANDS, "apply_spec_augment": False, "add_adapter": False},
    ),
    ("wav2vec2", "Wav2Vec2ForCTC", row_of(input_values=wave, labels=spoken), HEARD),
    (
        "whisper",
        "WhisperForConditionalGeneration",
        row_of(input_features=numbers(BANDS, FRAMES), labels=spoken),
        {"num_mel_bins": BANDS, "max_source_positions": FRAMES // 2},
    ),
    (
        "speech_to_text",
        "Speech2TextForConditionalGeneration",
        row_of(input_features=spectrum, labels=spoken),
        {"input_feat_per_channel": BANDS, "conv_channels": 16, "conv_kernel_sizes": [3, 3], "max_source_positions": FRAMES},
    ),
    (
        "speecht5",
        "SpeechT5ForSpeechToText",
        row_of(input_values=wave, labels=spoken),
        {**HEARD, "num_hidden_layers": 2, "encoder_layers": 2, "decoder_layers": 2},
    ),
    (
        "audio-spectrogram-transformer",
        "ASTForAudioClassification",
        row_of(input_values=spectrum, labels=of_class()),
        {"max_length": FRAMES, "num_mel_bins": BANDS, "frequency_stride": 4, "time_stride": 4, "patch_size": 4},
    ),
    ("moonshine", "MoonshineForConditionalGeneration", row_of(input_values=numbers(2000), labels=spoken), {}),
    *(
        (kind, f"{name}ForVideoClassification", row_of(pixel_values=film, labels=of_class()), {"num_frames": 2, **more})
        for kind, name, more in (
            ("timesformer", "Timesformer", {}),
            ("videomae", "VideoMAE", {}),
            ("vivit", "Vivit", {"tubelet_size": [2, 8, 8]}),
        )
    ),
    *(
        (kind, f"{name}ForSemanticSegmentation", row_of(pixel_values=image, labels=integers(5, SIZE, SIZE)), {})
        for kind, name in {"segformer": "Segformer", "dpt": "DPT", "beit": "Beit"}.items()
    ),
    (
        "llava",
        "LlavaForConditionalGeneration",
        row_of(input_ids=seen_words(PATCHES), pixel_values=image, labels=integers(VOCAB, PATCHES + LENGTH)),
        {"image_token_index": IMAGE_TOKEN},
    ),
    (
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        row_of(
            input_ids=seen_words(PATCHES),
            pixel_values=image,
            labels=integers(VOCAB, PATCHES + LENGTH),
            token_type_ids=lambda generator: torch.cat([torch.zeros(PATCHES), torch.ones(LENGTH)]).long(),
        ),
        {"image_token_id": IMAGE_TOKEN, "projection_dim": 32},
    ),
    ("git", "GitForCausalLM", row_of(input_ids=words, pixel_values=image, labels=words), {}),
    (
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        row_of(input_ids=words, labels=words),
        {},
    ),
    ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", row_of(input_ids=words, labels=words), {}),
    (
        "blip-2",
        "Blip2ForConditionalGeneration",
        row_of(input_ids=seen_words(4), pixel_values=image, labels=integers(VOCAB, 4 + LENGTH)),
        {"num_query_tokens": 4, "image_token_index": IMAGE_TOKEN},
    ),
    (
        "idefics3",
        "Idefics3ForConditionalGeneration",
        row_of(input_ids=seen_words(4), pixel_values=numbers(1, *PIXELS), labels=integers(VOCAB, 4 + LENGTH)),
        {"image_token_id": IMAGE_TOKEN, "scale_factor": 2},
    ),
    (
        "internvl",
        "InternVLForConditionalGeneration",
        row_of(input_ids=seen_words(4), pixel_values=image, labels=integers(VOCAB, 4 + LENGTH)),
        {"image_token_id": IMAGE_TOKEN},
    ),
    (
        "gemma3",
        "Gemma3ForConditionalGeneration",
        row_of(
            input_ids=seen_words(4),
            pixel_values=image,
            labels=integers(VOCAB, 4 + LENGTH),
            token_type_ids=lambda generator: torch.cat([torch.ones(4), torch.zeros(LENGTH)]).long(),
        ),
        {"image_token_index": IMAGE_TOKEN, "mm_tokens_per_image": 4},
    ),
    ("vilt", "ViltForMaskedLM", row_of(input_ids=words, pixel_values=image, labels=words), {}),
    (
        "layoutlmv3",
        "LayoutLMv3ForTokenClassification",
        row_of(input_ids=words, bbox=integers(50, LENGTH, 4), pixel_values=image, labels=integers(5, LENGTH)),
        {"input_size": SIZE, "coordinate_size": 5, "shape_size": 6},
    ),
    (
        "pix2struct",
        "Pix2StructForConditionalGeneration",
        row_of(
            flattened_patches=lambda g: torch.cat(
                [torch.randint(1, 5, (6, 2), generator=g).float(), torch.randn(6, 24, generator=g)], 1
            ),
            labels=spoken,
        ),
        {},
    ),
    (
        "canine",
        "CanineForSequenceClassification",
        row_of(input_ids=integers(VOCAB, 32), labels=of_class()),
        {"local_transformer_stride": 8, "downsampling_rate": 2, "num_hash_buckets": 64},
    ),
    (
        "patchtst",
        "PatchTSTForPrediction",
        row_of(past_values=numbers(16, 3), future_values=numbers(4, 3)),
        {
            "num_input_channels": 3,
            "context_length": 16,
            "prediction_length": 4,
            "patch_length": 4,
            "patch_stride": 4,
            "do_mask_input": False,
        },
    ),
    (
        "patchtsmixer",
        "PatchTSMixerForPrediction",
        row_of(past_values=numbers(16, 3), future_values=numbers(4, 3)),
        {"num_input_channels": 3, "context_length": 16, "prediction_length": 4, "patch_length": 4, "patch_stride": 4},
    ),
    *(
        (kind, f"{name}ForPrediction", row_of(**dated), SERIES)
        for kind, name in {
            "informer": "Informer",
            "autoformer": "Autoformer",
            "time_series_transformer": "TimeSeriesTransformer",
        }.items()
    ),
]
BARE: list[tuple[str, str, Rows, dict[str, Any]]] = [
    (
        "decision_transformer",
        "DecisionTransformerModel",
        row_of(
            states=numbers(6, 17),
            actions=numbers(6, 4),
            rewards=numbers(6, 1),
            returns_to_go=numbers(6, 1),
            timesteps=integers(50, 6),
            attention_mask=ones(6),
        ),
        {},
    ),
    ("dinov3_vit", "DINOv3ViTModel", row_of(pixel_values=image), {}),
    (
        "dinov3_convnext",
        "DINOv3ConvNextModel",
        row_of(pixel_values=image),
        {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1]},
    ),
    (
        "vit_mae",
        "ViTMAEForPreTraining",
        row_of(pixel_values=image, noise=numbers(PATCHES)),
        {
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 2,
            "decoder_intermediate_size": 16,
            "decoder_num_attention_heads": 2,
        },
    ),
    ("yolos", "YolosForObjectDetection", row_of(pixel_values=image), {"image_size": [SIZE, SIZE], "num_detection_tokens": 4}),
    ("detr", "DetrForObjectDetection", row_of(pixel_values=image), {"num_queries": 4}),
    ("deformable_detr", "DeformableDetrForObjectDetection", row_of(pixel_values=image), {"num_queries": 4}),
    ("rt_detr", "RTDetrForObjectDetection", row_of(pixel_values=numbers(3, 64, 64)), {"num_queries": 4}),
    ("mask2former", "Mask2FormerForUniversalSegmentation", row_of(pixel_values=image), {"num_queries": 4}),
    ("maskformer", "MaskFormerForInstanceSegmentation", row_of(pixel_values=image), {"num_queries": 4}),
    ("depth_anything", "DepthAnythingForDepthEstimation", row_of(pixel_values=image), {}),
    ("siglip_vision_model", "SiglipVisionModel", row_of(pixel_values=image), {}),
    ("clip_vision_model", "CLIPVisionModel", row_of(pixel_values=image), {}),
    ("clip_text_model", "CLIPTextModel", row_of(input_ids=words), {}),
    ("clip", "CLIPModel", row_of(input_ids=words, pixel_values=image), {}),
    ("clipseg", "CLIPSegForImageSegmentation", row_of(input_ids=words, pixel_values=image), {}),
    (
        "visual_bert",
        "VisualBertModel",
        row_of(input_ids=words, visual_embeds=numbers(4, 16), visual_attention_mask=ones(4)),
        {"visual_embedding_dim": 16},
    ),
    (
        "lxmert",
        "LxmertModel",
        row_of(input_ids=words, visual_feats=numbers(4, 16), visual_pos=numbers(4, 4)),
        {"visual_feat_dim": 16, "l_layers": 2, "r_layers": 2, "x_layers": 2},
    ),
    ("tapas", "TapasModel", row_of(input_ids=words, token_type_ids=lambda g: torch.randint(2, (LENGTH, 7), generator=g)), {}),
    ("mimi", "MimiModel", row_of(input_values=numbers(1, 400)), {}),
    ("encodec", "EncodecModel", row_of(input_values=numbers(1, 400)), {}),
    ("dac", "DacModel", row_of(input_values=numbers(1, 400)), {}),
]


def entries() -> Iterator[Entry]:
    """Yield the models that compute their loss, then those whose output is judged."""
    for kind, name, row, more in LABELLED:
        yield Entry("transformers", f"{kind}/{name}", partial(made, kind, name, **more), row, own_loss=True)
    for kind, name, row, more in BARE:
        yield Entry("transformers", f"{kind}/{name}", partial(made, kind, name, **more), row)
