"""Count the parameters of a layer, which is the unit that FSDP gathers and reduces at once."""

from __future__ import annotations

from piper_interop.neutral.described import USUAL_SIZES, ModelSizes

MIB = 2**20


def layer_parameters(sizes: ModelSizes) -> int:
    """Return the parameters of one layer: the matrices of attention and of its feed-forward part, and its norms.

    Biases are left out; they are less than a thousandth.
    """
    fields = sizes.fields
    width = fields["width"]
    return int(_attention(sizes) + _feed_forward(sizes) + 2 * width)


def unit_mb(sizes: ModelSizes, tp: int, ep: int, width: int) -> float:
    """Return the MiB of a layer's gradients on a device, in a dtype of `width` bytes, rounded up; 0 if it is unknown.

    Experts that `ep` devices share are left out: their gradients have buckets of their own, which no other layer joins
    if they are larger.
    """
    if "layers" not in sizes.fields:  # a model that is none of `piper.models`
        return 0.0
    parameters = layer_parameters(sizes)
    experts = sizes.fields.get("experts")
    if ep > 1 and isinstance(experts, ModelSizes):
        parameters -= experts.fields["number"] * _expert(sizes, experts)
    return megabytes(-(-parameters // tp), width)


def _attention(sizes: ModelSizes) -> int:
    fields = sizes.fields
    width, heads = fields["width"], fields["heads"]
    latent = fields.get("latent")
    if isinstance(latent, ModelSizes):
        part = latent.fields
        key = part["nope_dim"] + part["rope_dim"]
        query = part.get("q_rank") or 0
        return int(
            (width * query + query * heads * key if query else width * heads * key)
            + width * (part["kv_rank"] + part["rope_dim"])
            + part["kv_rank"] * heads * (part["nope_dim"] + part["value_dim"])
            + heads * part["value_dim"] * width
        )
    size = fields.get("head_dim") or width // heads
    shared = fields.get("kv_heads") or heads
    return int(2 * width * heads * size + 2 * width * shared * size)


def _feed_forward(sizes: ModelSizes) -> int:
    fields = sizes.fields
    width = fields["width"]
    matrices = 3 if fields.get("gated", True) else 2
    experts = fields.get("experts")
    if not isinstance(experts, ModelSizes):
        return int(matrices * width * fields["hidden"])
    part = experts.fields
    shared = matrices * width * (part.get("shared_hidden") or 0)
    return int(part["number"] * (_expert(sizes, experts) + width) + shared)


def _expert(sizes: ModelSizes, experts: ModelSizes) -> int:
    fields = sizes.fields
    matrices = 3 if fields.get("gated", True) else 2
    return int(matrices * fields["width"] * (experts.fields.get("hidden") or fields["hidden"]))


def whole(sizes: ModelSizes) -> int:
    """Return the parameters of the model: its layers, its embedding, and its head."""
    fields = sizes.fields
    vocab = fields.get("vocab", USUAL_SIZES["vocab"])
    ends = vocab * fields["width"] * (1 if fields.get("tied") else 2)
    return int(fields["layers"] * layer_parameters(sizes) + ends)


def megabytes(parameters: int, width: int) -> float:
    """Return MiB of parameters of `width` bytes each, rounded up."""
    return float(-(-parameters * width // MIB))


def by_layer(bucket_mb: float | None, unit: float) -> str:
    """Return the note that FSDP has a bucket for each layer, where a strategy has buckets of another size."""
    each = f" ({unit:g} MiB)" if unit else ""
    return f"FSDP gathers layer by layer{each}, not in buckets of {bucket_mb or 25:g} MiB"
