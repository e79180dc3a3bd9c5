"""Compute the numbers that Megatron-LM derives from the options: replicas, microbatches, stages and their layers."""

from __future__ import annotations

from dataclasses import dataclass

from piper_interop.megatron import stages
from piper_interop.neutral.described import ExpertAxes, axes_of_experts
from piper_interop.neutral.foreign import Foreign
from piper_ir.ground.errors import JobError


@dataclass(frozen=True)
class Degrees:
    """Hold the numbers of devices that share a layer, tokens, the pipeline, and experts.

    Attributes:
        devices: of the job.
        tp: that share each layer.
        cp: that share the tokens of a row.
        pp: along the pipeline.
        dp: replicas with rows of their own.
        ep: that share experts.
        etp: that share each expert.
    """

    devices: int
    tp: int
    cp: int
    pp: int
    dp: int
    ep: int
    etp: int

    @property
    def model(self) -> int:
        """Return the devices of one replica."""
        return self.tp * self.cp * self.pp

    @property
    def experts_cut_alike(self) -> int:
        """Return the devices that share whole experts if each expert is cut by tp, as many parameters on a device."""
        return self.ep * self.etp // self.tp if self.ep * self.etp % self.tp == 0 else 0

    @property
    def cut(self) -> ExpertAxes | None:
        """Return the axes of experts that etp devices cut; None if some lie along a part of an axis.

        The order is that of Megatron-LM, core/parallel_state.py, `expert_decoder_rank_generator`.
        """
        return axes_of_experts(self.ep, self.tp, self.cp, self.dp, self.etp)

    @property
    def exchanged(self) -> ExpertAxes | None:
        """Return the axes of exchanged experts: as `cut`, or of whole ones over ep x etp devices."""
        return self.cut or axes_of_experts(self.ep * self.etp, self.tp, self.cp, self.dp)


def degrees(foreign: Foreign) -> Degrees:
    """Return the numbers of devices; dp is 1 where the devices do not divide, or nobody says how many they are."""
    tp, cp = foreign["tensor-model-parallel-size"], foreign["context-parallel-size"]
    pp, devices = foreign["pipeline-model-parallel-size"], foreign.facts.get("devices") or 0
    dp = max(1, devices // max(1, tp * cp * pp))
    return Degrees(
        devices, tp, cp, pp, dp, foreign["expert-model-parallel-size"],
        foreign.get("expert-tensor-parallel-size", tp),
    )  # fmt: skip


def check(foreign: Foreign) -> Degrees:
    """Return the numbers of devices; raise JobError if they do not divide."""
    found = degrees(foreign)
    product = f"tp {found.tp} x cp {found.cp} x pp {found.pp} = {found.model}"
    if not found.devices:
        raise JobError(
            f"{foreign.source}: the number of devices is not said; give --gpus N, a multiple of {product}"
        )
    if found.devices % found.model:
        raise JobError(
            f"{foreign.source}: {found.devices} devices are no multiple of {product}; give --gpus N with such a number"
        )
    return found


def batch(foreign: Foreign, replicas: int) -> tuple[int, int]:
    """Return the rows of a step and of a microbatch; raise JobError if they do not divide over the replicas."""
    rows = foreign.get("micro-batch-size")
    if not rows:
        raise JobError(f"{foreign.source}: --micro-batch-size is needed")
    whole = _last(foreign) or foreign.get("global-batch-size", rows * replicas)
    if whole % (rows * replicas) and foreign["decrease-batch-size-if-needed"]:
        whole -= whole % (rows * replicas)
    if whole < 1 or whole % (rows * replicas):
        raise JobError(
            f"{foreign.source}: {whole} rows of a step do not divide into {replicas} replicas with microbatches of "
            f"{rows}; give a --gpus whose replicas divide {max(1, whole // rows)}, or --set with other rows"
        )
    return whole, rows


def _last(foreign: Foreign) -> int | None:
    """Return the last batch of a schedule of batches, such as 1536 of "0:16 2.4B:320 9.6B:1536"."""
    schedule = foreign.get("step-batch-size-schedule")
    if schedule is None:
        return None
    text = " ".join(schedule)
    number = text.rpartition(":")[2].strip()
    if not number.isdigit():
        raise JobError(
            f"{foreign.source}: --step-batch-size-schedule {text!r}{foreign.at('step-batch-size-schedule')}: "
            'pairs such as "0:384 200B:768" are needed'
        )
    return int(number)


def layers(foreign: Foreign) -> int:
    """Return the number of layers; raise JobError if nobody says it."""
    number = foreign.get("num-layers", foreign.get("encoder-num-layers"))
    if not number:
        raise JobError(f"{foreign.source}: --num-layers is needed")
    return int(number)


def chunks(foreign: Foreign) -> int:
    """Return the stages of each device; raise JobError for several on the one device of no pipeline."""
    number = _chunks(foreign)
    if number < 1 or (number > 1 and foreign["pipeline-model-parallel-size"] == 1):
        raise JobError(
            f"{foreign.source}: {number} stages on a device need --pipeline-model-parallel-size of 2 or more"
        )
    return number


def _chunks(foreign: Foreign) -> int:
    """Return the stages of each device, as Megatron derives them from layers, stages, or a layout."""
    pp = foreign["pipeline-model-parallel-size"]
    layout, per_stage = (
        foreign.get(name)
        for name in ("pipeline-model-parallel-layout", "num-layers-per-virtual-pipeline-stage")
    )
    number = foreign.get("num-virtual-stages-per-pipeline-rank")
    if sum(value is not None for value in (layout, per_stage, number)) > 1:
        raise JobError(
            f"{foreign.source}: give one of --pipeline-model-parallel-layout, --num-layers-per-virtual-pipeline-stage "
            "and --num-virtual-stages-per-pipeline-rank"
        )
    if layout is not None:
        units = len(stages.unrolled(layout))
        if units % pp:
            raise JobError(
                f"{foreign.source}: layout {layout!r}: its {units} stages do not divide over {pp} devices"
            )
        return units // int(pp)
    if per_stage is None:
        return int(number or 1)
    whole = layers(foreign) + sum(
        foreign[f"account-for-{name}-in-pipeline-split"] for name in ("embedding", "loss")
    )
    if per_stage < 1 or whole % pp or whole // pp % per_stage:
        raise JobError(
            f"{foreign.source}: {whole} layers do not divide over {pp} devices into stages of {per_stage}; give "
            "--num-virtual-stages-per-pipeline-rank, or a layout"
        )
    return int(whole // pp // per_stage)


def further(foreign: Foreign) -> int:
    """Return the layers that predict further tokens (MTP)."""
    return int(foreign.get("mtp-num-layers") or 0)


def layers_of_stages(foreign: Foreign) -> tuple[int, ...]:
    """Return the layers of each stage, in the order in which a microbatch passes them.

    Those for further tokens are on the last stage unless a layout says otherwise.
    """
    layout = foreign.get("pipeline-model-parallel-layout")
    if layout is not None:
        return stages.of_layout(layout, layers(foreign), further(foreign))
    *others, last = _decoder_layers_of_stages(foreign)
    return *others, last + further(foreign)


def _decoder_layers_of_stages(foreign: Foreign) -> tuple[int, ...]:
    pp, number, whole = foreign["pipeline-model-parallel-size"], chunks(foreign), layers(foreign)
    first, last = (foreign.get(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    embedding, loss = (
        foreign[f"account-for-{name}-in-pipeline-split"] for name in ("embedding", "loss")
    )
    if first is None and last is None:
        return stages.even(whole, pp, number, embedding=embedding, loss=loss)
    if embedding or loss:
        raise JobError(
            f"{foreign.source}: --decoder-first-pipeline-num-layers and --account-for-embedding-in-pipeline-split exclude "
            "each other; give a layout"
        )
    return stages.uneven(whole, pp, number, first, last)


def vocabulary(foreign: Foreign) -> int:
    """Return the rows of the embedding: the vocabulary, filled up as Megatron does it for each of tp devices.

    Raises JobError where nobody says how many tokens the tokenizer has.
    """
    padded = foreign.get("padded-vocab-size")
    if padded is not None:
        return int(padded)
    tokens = tokens_of(foreign)
    if tokens is None:
        raise JobError(
            f"{foreign.source}: the size of the vocabulary is not said, and stands in the tokenizer's file; give "
            '--set "--vocab-size N"'
        )
    if foreign["no-pad-vocab-size"]:
        return tokens
    multiple = foreign["make-vocab-size-divisible-by"] * foreign["tensor-model-parallel-size"]
    return int(-(-tokens // multiple) * multiple)


KNOWN = {
    "GPT2BPETokenizer": 50257,
    "BertWordPieceLowerCase": 30522,
    "BertWordPieceCase": 28996,
    "Llama2Tokenizer": 32000,
    "TikTokenizer": 131072,
    "vocab.json": 50257,
    "gpt2-vocab.json": 50257,
    "nemotron_2_256k.model": 256000,
}
"""The tokens of public tokenizers, by the type or the name of the file."""


def tokens_of(foreign: Foreign) -> int | None:
    """Return the tokens of the vocabulary: the given ones, or the ones of a public tokenizer; None for another one."""
    given = foreign.get("vocab-size")
    if given is not None:
        return int(given)
    for name in ("tokenizer-model", "vocab-file", "tokenizer-type", "merge-file"):
        known = KNOWN.get(str(foreign.get(name, "")).rpartition("/")[2])
        if known:
            return known
    if foreign.get("tokenizer-type"):
        return None
    if str(foreign.get("vocab-file", "")).rpartition("/")[2] == "vocab.txt":
        return KNOWN["BertWordPieceLowerCase"]  # the default of pretrain_bert.py
    return KNOWN["GPT2BPETokenizer"] if foreign.get("merge-file") is not None else None
