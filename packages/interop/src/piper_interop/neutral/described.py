"""Describe a job in words that all systems share; every reader ends here, and every export begins here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any


def literal(value: Any) -> str:
    """Return a value as people write it in Python: texts between double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{literal(k)}: {literal(v)}' for k, v in value.items())}}}"
    return repr(value)


@dataclass(frozen=True)
class ExpertAxes:
    """Say along which axes the devices of a mixture's experts lie.

    Attributes:
        ep: devices with different experts.
        folded: the axes along which these lie beside the replicas: "tp" and "cp", or neither.
        hidden: the axes along which devices cut each expert: "tp", "cp", and "etp" for replicas.
        etp: the replicas among the latter.
    """

    ep: int = 1
    folded: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    etp: int = 1


def axes_of_experts(
    devices: int, tp: int, cp: int, replicas: int, cut_by: int = 1
) -> ExpertAxes | None:
    """Return the axes of so many devices with different experts, each of which `cut_by` devices cut.

    Ranks that cut an expert are neighbours, and then groups of them with other experts: along tp, cp, and the replicas.
    None if they take a part of an axis.
    """
    axes = {"tp": tp, "cp": cp}
    hidden, in_replicas = _taken(axes, cut_by)
    folded, rest = _taken(
        {} if in_replicas > 1 else {a: n for a, n in axes.items() if a not in hidden}, devices
    )
    if in_replicas < 1 or rest < 1 or replicas % (in_replicas * rest):
        return None
    return ExpertAxes(devices, folded, (*hidden, *["etp"] * (in_replicas > 1)), in_replicas)


def _taken(axes: Mapping[str, int], devices: int) -> tuple[tuple[str, ...], int]:
    """Return the axes that so many devices take, and how many are left for each; 0 if they take a part of one."""
    taken = list[str]()
    for axis, size in axes.items():
        if devices == 1 or size == 1:
            continue
        if devices % size:
            return (), 0
        devices //= size
        taken.append(axis)
    return tuple(taken), devices


USUAL_SIZES = {"vocab": 128_256, "length": 8_192}
"""The defaults of sizes in `piper.models.DecoderConfig`, which ModelSizes leaves out."""


@dataclass(frozen=True)
class ModelSizes:
    """Hold the sizes of a decoder: the fields of `piper.models.DecoderConfig` that are not at their defaults.

    Attributes:
        fields: the values by name; `experts` and `latent` are ModelSizes, too.
        kind: the name of the class in `piper.models`.
    """

    fields: Mapping[str, Any]
    kind: str = "DecoderConfig"

    def text(self) -> str:
        """Return the Python that makes it, after `import piper`."""
        arguments = ", ".join(
            f"{name}={value.text() if isinstance(value, ModelSizes) else literal(value)}"
            for name, value in self.fields.items()
        )
        return f"piper.models.{self.kind}({arguments})"


@dataclass(frozen=True)
class Recomputation:
    """Say which layers compute their activations again, and from which tensors: the directive `recompute`.

    Attributes:
        keep: the policy, such as "inputs" or "products"; with "@" and patterns behind it, inside of modules.
        layers: the number of layers, from the first; their numbers, if others are chosen; None for all.
        group: neighbouring layers that are made again as one.
    """

    keep: str
    layers: int | tuple[int, ...] | None = None
    group: int = 1


@dataclass(frozen=True)
class OffloadedTensors:
    """Say which activations wait for their backward in the memory of the host: the directive `offload`.

    Attributes:
        tensors: "all", "saved" or "inputs", as the directive says it.
        layers: the number of layers, from the first; None for all.
        prefetch: the backwards ahead of its own for which a tensor is brought back.
        modules: patterns of the modules whose tensors these are; () for all.
    """

    tensors: str = "all"
    layers: int | None = None
    prefetch: int = 1
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Float8Layers:
    """Say which linear layers multiply in float8: the fields of `piper.Float8`.

    Attributes:
        recipe: the name of the recipe.
        modules: patterns of the names of layers in the model here.
        keep: patterns of others, which stay in their dtype.
        saved: the tensor that waits for the gradient of a weight: "input", or "float8".
    """

    recipe: str
    modules: tuple[str, ...] = ("*",)
    keep: tuple[str, ...] = ()
    saved: str = "input"


@dataclass(frozen=True)
class DeviceLayout:
    """Say how a job is spread over devices.

    Attributes:
        tp: devices that share each layer.
        sequence: whether activations between layers are sharded along their tokens over these.
        pieces: the pieces of products that run beside the messages of others over these; 1 if none does.
        cp: devices that share the tokens of a row.
        attention: how these exchange keys and values: "ring", "gather" or "heads".
        pp: devices along the pipeline.
        schedule: the name of a recipe, such as "one_f_one_b" or "interleaved".
        chunks: stages of a device.
        group: microbatches that an interleaved schedule takes together; None for the recipe's own.
        at: the first layers of the stages 1, 2, ...; () for stages as even as they go.
        units: "layers", or "all" if embedding and head count as layers in `at` and among the stages.
        dp: replicas with rows of their own, of which each holds one shard of the states.
        dp_replicate: groups of these that hold the same shards (hybrid sharding).
        ep: devices that share experts, all of them.
        folded: the axes beside those of the replicas of which these devices are made: "tp" and "cp", or neither.
        hidden: the axes along which devices cut each expert: "tp", "cp", and "etp" for replicas; none for whole ones.
        etp: the replicas whose devices cut each expert.
        beside: whether rows travel to experts while shared experts are computed.
        zero: the states that are sharded: 0 none, 1 the optimizer's, 2 gradients too, 3 parameters too.
        over_cp: whether states are sharded over cp, too.
        reshard: whether gathered parameters are dropped after the forward and gathered again (zero=3).
        reduce_once: whether a device sums whole gradients of a step, and scatters them once (zero=2 and 3).
        bucket_mb: MiB of a bucket of gradients; None for the recipe's own.
        prefetch: uses ahead for which parameters are gathered; None for the recipe's own.
        whole_mb: MiB of a parameter, in the compute dtype, up to which it is not sharded (zero=3).
        overlap: whether reductions of gradients and gathers of parameters run beside compute.
        order: the axes along which neighbouring ranks differ first, if it is not the usual order.
    """

    tp: int = 1
    sequence: bool = False
    pieces: int = 1
    cp: int = 1
    attention: str = "ring"
    pp: int = 1
    schedule: str = "one_f_one_b"
    chunks: int = 1
    group: int | None = None
    at: tuple[int, ...] = ()
    units: str = "layers"
    dp: int = 1
    dp_replicate: int = 1
    ep: int = 1
    folded: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    etp: int = 1
    beside: bool = False
    zero: int = 0
    over_cp: bool = False
    reshard: bool = True
    reduce_once: bool = False
    bucket_mb: float | None = None
    prefetch: int | None = None
    whole_mb: float = 0
    overlap: bool = True
    order: tuple[str, ...] = ()

    def in_pieces(self, most: int, length: int) -> DeviceLayout:
        """Return the layout with products in up to `most` pieces, as far as they divide the tokens of a device.

        Along cp a device has two blocks of a row, each in these pieces.
        """
        own = length // (self.tp * (2 * self.cp if self.cp > 1 else 1)) if self.sequence else 1
        return replace(self, pieces=next(k for k in range(most, 0, -1) if own % k == 0))

    @property
    def sharing_replicas(self) -> int:
        """Return the replicas whose devices share experts: ep without the folded axes."""
        sizes = {"tp": self.tp, "cp": self.cp}
        return self.ep // prod(sizes[axis] for axis in self.folded)

    @property
    def devices(self) -> int:
        """Return the number of devices."""
        return self.tp * self.cp * self.pp * self.replicas

    @property
    def replicas(self) -> int:
        """Return the number of replicas with rows of their own."""
        return self.dp * self.dp_replicate


ORIGINS = (
    *(
        "sizes",
        "job",
        "mesh",
        "tp",
        "cp",
        "ep",
        "pp",
        "batch",
        "loss",
        "recompute",
        "offload",
        "dp",
    ),
)
"""The lines of a FILE.py that name the options that they come from."""


USUAL_SCALE = {
    "initial": 65536.0,
    "growth": 2.0,
    "backoff": 0.5,
    "interval": 2000,
    "hysteresis": 1,
    "least": 1.0,
}
"""The defaults of `piper.LossScale`."""


def loss_scale(**fields: float) -> tuple[tuple[str, float], ...]:
    """Return the fields of a scale that are not the defaults."""
    return tuple((name, value) for name, value in fields.items() if value != USUAL_SCALE[name])


@dataclass(frozen=True)
class JobDescription:
    """Describe a job and its strategy.

    Attributes:
        name: of the model, for titles and files.
        sizes: of the model.
        length: tokens of a row.
        global_batch: rows of a step.
        rows: rows of a microbatch of one replica.
        layout: the devices' shares.
        recompute: the layers that are computed again; () for none.
        offload: the activations that wait on the host; None for none.
        optim_on_host: the fraction of the layers whose optimizer is on the host; 1 for that of the whole model.
        params_on_host: whether the parameters are there, too; then `optim_on_host` is 1.
        loss_tiles: the tiles of tokens in which logits and loss are computed.
        params: the dtype of parameters, gradients' sums and optimizer states.
        compute: the dtype of forward and backward.
        reduce: the dtype of gradients in messages.
        accumulate: the dtype in which ranks sum gradients over microbatches; "" for that of messages.
        loss_scale: with float16, the fields of `piper.LossScale` that are not its defaults, or ("fixed", SCALE) for a
            scale that stays.
        float8: the linear layers that multiply in float8; None for none.
        clip_norm: the largest norm of the gradients; None for no bound.
        lr: the learning rate.
        optimizer: "adamw", or "muon" for the matrices of layers and AdamW for all else.
        parameters: the count that the system itself says; None if it says none.
        stack: the kernels, as clusters name them: "eager", "inductor" or "megatron"; "" if the job does not say it.
        cuda_graph: whether forward and backward of a step are one CUDA graph: `piper.Options(cuda_graph=True)`.
        notes: stand-ins and nearest forms, which every prediction of the job must name.
        origins: the options that lines of a FILE.py come from, by the names of ORIGINS; no part of the description.
    """

    name: str
    sizes: ModelSizes
    length: int
    global_batch: int
    rows: int
    layout: DeviceLayout = field(default_factory=DeviceLayout)
    recompute: tuple[Recomputation, ...] = ()
    params: str = "float32"
    compute: str = "bfloat16"
    reduce: str = "float32"
    clip_norm: float | None = None
    lr: float = 3e-4
    parameters: int | None = None
    stack: str = ""
    cuda_graph: bool = False
    notes: tuple[str, ...] = ()
    offload: OffloadedTensors | None = None
    optim_on_host: float = 0.0
    params_on_host: bool = False
    loss_tiles: int = 1
    loss_scale: tuple[tuple[str, float], ...] = ()
    float8: Float8Layers | None = None
    accumulate: str = ""
    optimizer: str = "adamw"
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def microbatches(self) -> int:
        """Return the number of microbatches of a replica."""
        return self.global_batch // (self.rows * self.layout.replicas)

    @property
    def layers_on_host(self) -> int:
        """Return the number of the first layers whose optimizer is on the host, the nearest to the fraction."""
        return max(1, round(self.optim_on_host * int(self.sizes.fields["layers"])))
