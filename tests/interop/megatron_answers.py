"""Ask Megatron-LM's own parser, in its interpreter: python megatron_answers.py CHECKOUT QUESTIONS.json ANSWERS.json.

A question has `arguments` as words, `devices`, and `vocabulary`, the tokens of the tokenizer. The answer has the numbers
that `validate_args` derives, or `error`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def answer(arguments: list[str], devices: int, vocabulary: int | None) -> dict[str, Any]:
    """Return the numbers that Megatron derives from a job's arguments."""
    from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.training.arguments import parse_args, validate_args

    sharded = {"--use-megatron-fsdp", "--use-torch-fsdp2"} & set(arguments)
    os.environ["WORLD_SIZE"] = str(devices)
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8" if sharded else "1"
    sys.argv = ["pretrain_gpt.py", *arguments]
    args = parse_args()
    validate_args(args)
    pp, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    text = args.pipeline_model_parallel_layout
    layout = None if text is None else PipelineParallelLayerLayout(text, pp)
    # A TransformerConfig asks for kernels that are not here; these of its fields say which layers a stage has.
    config: Any = SimpleNamespace(**vars(args))
    config.num_layers_in_first_pipeline_stage = args.decoder_first_pipeline_num_layers
    config.num_layers_in_last_pipeline_stage = args.decoder_last_pipeline_num_layers
    layers = []
    for chunk in range(chunks or 1):
        for rank in range(pp):
            if layout is None:
                number = get_num_layers_to_build(config, chunk if chunks else None, rank)
            else:
                number = sum(kind.name in ("decoder", "mtp") for kind in layout.layout[rank][chunk])
            layers.append(number)
    if layout is None:
        layers[-1] += args.mtp_num_layers or 0  # on the last stage, and counted as layers here
    padded = args.padded_vocab_size
    if padded is None and vocabulary is not None:
        padded = vocab_size_with_padding(vocabulary, args, logging_enabled=False)
    return {
        "dp": args.data_parallel_size,
        "global_batch": args.global_batch_size,
        "microbatches": args.global_batch_size // args.micro_batch_size // args.data_parallel_size,
        "chunks": chunks or 1,
        "layers": layers,
        "hidden": args.ffn_hidden_size,
        "channels": args.kv_channels,
        "sequence": args.sequence_parallel,
        "vocab": padded,
        "group": args.microbatch_group_size_per_vp_stage or pp,
    }


def options() -> list[str]:
    """Return the names of all options of the parser."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    actions = [action for action in parser._actions if action.dest != "help"]
    return [name for action in actions for name in action.option_strings]


def main(checkout: str, questions: Path, answers: Path) -> None:
    """Answer all questions of a file."""
    sys.path.insert(0, checkout)
    import torch

    # Parsing asks a device, which is not here.
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0)
    found: list[Any] = []
    for question in json.loads(questions.read_text()):
        try:
            found.append(answer(question["arguments"], question["devices"], question["vocabulary"]))
        except (SystemExit, Exception) as error:  # each answer by itself, as Megatron gives it
            line = traceback.extract_tb(error.__traceback__)[-1].lineno
            found.append({"error": f"{type(error).__name__}: {error} (line {line})"})
    answers.write_text(json.dumps({"options": options(), "answers": found}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
