"""Describe kernel stacks: whose kernels run a model.

Constants of a device differ between stacks. So each stack has data of its own. data/stacks.toml has published facts
with their source, for any device; nothing there is fitted. The folder data/stacks has a file for each generation of
devices and each software on it: facts that are read or counted, and at most eight constants with ranges
(`piper_simulator.cluster.constants`). A cluster file may describe further stacks, in tables of the same form.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from piper_ir.ground.errors import ClusterError
from piper_ir.tools import names, unread
from piper_simulator.cluster.checks import (
    FRACTION,
    NOT_NEGATIVE,
    TEXT,
    KeyPath,
    NotNegative,
    Positive,
    Text,
    checks_of,
    list_of,
    list_of_each,
    mapping,
    one_of,
    table,
)
from piper_simulator.cluster.constants import CONSTANTS, StackConstant, read_constants

KINDS = ("matmul", "attention", "norm", "elementwise", "embedding", "loss", "other")
GENERATIONS = ("ampere", "hopper", "blackwell")
FILLED = ("matmul", "attention", "norm")
"""The kinds of kernels whose results a stack may fill, see `Stack.fills`."""
HELD = ("layer gradients", "head gradient", "scores")
"""The buffers that a stack may hold beside a plan's, see `Stack.holds`."""


Fractions = tuple[Positive, Positive]
"""The fractions of the peak that a kernel reaches, forward and backward."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Describe a kernel stack: whose kernels run a model, and how.

    Attributes:
        name: as in "h100x8@eager".
        attention: name of the attention kernel.
        attention_fraction: generation of devices -> fraction of the 16-bit peak that the kernel reaches, forward and
            backward.
        lowering: an operator that is one node of a plan is "one kernel", or the kernels that eager "torch" launches for
            it (`piper_simulator.durations.eager_launches`).
        optimizer: how parameters are updated (`piper_simulator.durations.updates`).
        fused: kinds of kernels that are launched as one kernel per step.
        saved: tensors that a forward keeps for its backward by default; for people, since a plan has its own.
        overlap: messages that run beside computation by default; for people, since a plan has its own.
        source: where these facts come from.
        devices: the devices that its constants hold for; none if it has no constants.
        words: words by which a table of published runs names this software, in their source or note.
        attention_tokens: generation of devices -> the tokens of a row at which attention reaches half of its fraction.
        attention_wide: generation of devices -> the factors of its fractions, forward and backward, with heads of more
            than 128 dimensions, as latent attention has.
        attention_narrow: the same factors with heads of up to 64 dimensions; between 64 and 128 they rise to 1.
        recomputed: the tensors that R makes: the ones that are "needed", or the "whole" forward with its messages, as
            checkpointing by reentrant autograd does.
        accumulate: gradients are added to their sums by a "kernel", or inside of the "product" that makes them.
        runs: neighbouring element-wise kernels are launched "each", or "fused": a run of them reads and writes as
            much as its largest member.
        joined: products of the same input are one product (queries, keys and values; gate and up).
        pads: matrices of products are padded to rows of multiples of 16 bytes (torch.compile's shape_padding).
        remakes: operators whose results the backward's kernels make again, so that they are not saved.
        shares: the router's shares are multiplied into the experts' "results", which are saved for their gradient, or
            into the "activation" between their products; then no result is saved.
        places: dropless experts keep and send as many rows as the plan's "bound" says, or the "rows" there are.
        passes: operator, or one of a step ("W.add") -> the bytes that its kernels move, over the ones that the plan
            counts; 0 where there are none.
        fills: kinds of kernels whose results are filled with NaN before they are written.
        loss_bytes: bytes read and written per logit by a cross-entropy, forward and backward; () as `lowering` says.
        loss_keeps: bytes per logit that are held at the loss beside the tensors of the plan.
        tile_s: seconds in which a wave of tiles of a matrix product starts and ends.
        gradients: messages of data parallelism run "beside" the backward, or "behind" it.
        transfers: between stages each device sends the "whole" of a tensor that tensor parallelism replicates, or they
            send its "parts", which the receivers gather.
        dispatch: tokens go to experts on other devices as "copies", one for each expert, or "once" to each of their
            nodes, and within a node to each device (DeepEP).
        messages: name of a table of measured messages in the folder data, for the links of its devices; "" if none.
        holds: buffers that the software holds beside the plan's: "layer gradients" (of the weights of one layer, in
            16 bit), "head gradient" (float32), "scores" (of the attention of one layer, the addend of
            its product).
        shards: parameters that ranks share in another dtype than their masters are "kept" beside these, or each is
            "cast" where it is gathered (FSDP), so that a rank has the master alone.
        workspaces: bytes that its libraries of matrix products hold at all times.
        grouped_workspaces: further bytes that they hold where a device has grouped products of experts.
        reserved: bytes that its allocator reserves, over the allocated ones; 0 as the device's file says.
        seen: half of the width of the interval in which 80 % of the published runs of this stack fall, as a share.
        constants: the constants by name.
    """

    name: Text
    attention: Text
    attention_fraction: Mapping[str, Fractions]
    lowering: Literal["torch", "one kernel"]
    optimizer: Literal["fused", "foreach"]
    fused: tuple[Annotated[str, one_of(*KINDS)], ...]
    saved: Text
    overlap: tuple[Text, ...]
    source: Text
    devices: tuple[Text, ...] = ()
    words: tuple[Text, ...] = ()
    attention_tokens: Mapping[str, NotNegative] = field(default_factory=dict)
    attention_wide: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    attention_narrow: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    recomputed: Literal["needed", "whole"] = "needed"
    accumulate: Literal["kernel", "product"] = "kernel"
    runs: Literal["each", "fused"] = "each"
    joined: bool = False
    pads: bool = False
    remakes: tuple[Text, ...] = ()
    shares: Literal["results", "activation"] = "results"
    places: Literal["bound", "rows"] = "bound"
    passes: Annotated[Mapping[str, NotNegative], mapping(NOT_NEGATIVE)] = field(
        default_factory=dict
    )
    fills: Annotated[tuple[str, ...], list_of(one_of(*FILLED))] = ()
    loss_bytes: Annotated[tuple[float, ...], list_of(NOT_NEGATIVE)] = ()
    loss_keeps: NotNegative = 0.0
    tile_s: NotNegative = 0.0
    gradients: Literal["beside", "behind"] = "beside"
    transfers: Literal["whole", "parts"] = "whole"
    dispatch: Literal["copies", "once"] = "copies"
    messages: str = ""
    holds: tuple[Annotated[str, one_of(*HELD)], ...] = ()
    shards: Literal["kept", "cast"] = "kept"
    workspaces: NotNegative = 0.0
    grouped_workspaces: NotNegative = 0.0
    reserved: NotNegative = 0.0
    seen: NotNegative = 0.0
    constants: Mapping[str, StackConstant] = field(default_factory=dict)

    @property
    def keeps_otherwise(self) -> bool:
        """Return whether it keeps tensors in other sizes than a plan."""
        return self.shares == "activation" or self.places == "rows" or bool(self.remakes)

    @property
    def number(self) -> dict[str, float]:
        """Return the values of the constants by name."""
        return {name: one.value for name, one in self.constants.items()}


_OWN = (
    "name", "attention_fraction", "attention_tokens", "attention_wide", "attention_narrow", "constants",
)  # fmt: skip
_STACK = {key: check for key, check in checks_of(Stack).items() if key not in _OWN}
_NEEDED = [
    f.name
    for f in fields(Stack)
    if f.name not in _OWN and f.default is MISSING and f.default_factory is MISSING
]
_TOKENS_OF = {g: f"{g}_tokens" for g in GENERATIONS}
_WIDE_OF = {g: f"{g}_wide" for g in GENERATIONS}
_NARROW_OF = {g: f"{g}_narrow" for g in GENERATIONS}
_ATTENTION = table(
    {"source": TEXT}
    | dict.fromkeys(
        (*GENERATIONS, *_WIDE_OF.values(), *_NARROW_OF.values()), list_of_each(FRACTION, FRACTION)
    )
    | dict.fromkeys(_TOKENS_OF.values(), NOT_NEGATIVE)
)
_FILE = table(_STACK | {"base": TEXT, "constants": CONSTANTS})
TABLES = {"attention": mapping(_ATTENTION), "stacks": mapping(_FILE)}
"""The checks of the tables that describe stacks and attention kernels, in every file that may have them."""


def described_stacks(
    file: Mapping[str, Any], kernels: Mapping[str, Any], where: KeyPath, bases: Mapping[str, Stack]
) -> dict[str, Stack]:
    """Return the stacks that a file describes, by name.

    `file` holds tables that fit TABLES; `kernels` are the attention kernels that its stacks may use beside its own, and
    `bases` the stacks whose facts hold for the ones that name one as `base`. Raises ClusterError with the keys of a
    stack that lacks a field or has an unknown attention kernel.
    """
    known = {**kernels, **file.get("attention", {})}
    return {
        name: read_stack(name, entry, known, where.at("stacks").at(name), bases)
        for name, entry in file.get("stacks", {}).items()
    }


def read_stack(
    name: str,
    entry: Mapping[str, Any],
    kernels: Mapping[str, Any],
    where: KeyPath,
    bases: Mapping[str, Stack],
) -> Stack:
    """Return a stack of a file's table, checked."""
    said = {k: v for k, v in entry.items() if k != "base"}
    base = None
    if "base" in entry:
        base = bases[one_of(*bases)(entry["base"], where.at("base"))]
    facts = {} if base is None else {k: getattr(base, k) for k in _STACK}
    if missing := [k for k in _NEEDED if k not in said and k not in facts]:
        raise where.error(f"{', '.join(missing)} missing")
    values = facts | {k: tuple(v) if isinstance(v, list) else v for k, v in said.items()}
    if values["attention"] not in kernels:
        raise where.at("attention").error(
            f"no kernel {values['attention']!r}; known: {', '.join(kernels)}"
        )
    kernel = kernels[values["attention"]]
    values["attention_fraction"] = {g: tuple(f) for g, f in kernel.items() if g in GENERATIONS}
    values["attention_tokens"] = {g: kernel[t] for g, t in _TOKENS_OF.items() if t in kernel}
    values["attention_wide"] = {g: tuple(kernel[w]) for g, w in _WIDE_OF.items() if w in kernel}
    values["attention_narrow"] = {g: tuple(kernel[n]) for g, n in _NARROW_OF.items() if n in kernel}
    if values.get("loss_bytes") and len(values["loss_bytes"]) != 2:
        raise where.at("loss_bytes").error("two numbers are needed, forward and backward")
    constants = read_constants(entry.get("constants", {}), where.at("constants"))
    known = {} if base is None else dict(base.constants)
    return Stack(**(values | {"name": name, "constants": known | constants}))


_FOLDER = Path(__file__).parent / "data"
_GENERAL = _FOLDER / "stacks.toml"
_BUILT_IN = table(TABLES)(
    tomllib.loads(_GENERAL.read_text(encoding="utf-8")), KeyPath(str(_GENERAL))
)
ATTENTION_KERNELS: Mapping[str, Any] = _BUILT_IN["attention"]
"""The built-in attention kernels by name: by generation, the fractions of the peak that they reach, and a source."""
GENERAL: Mapping[str, Stack] = described_stacks(_BUILT_IN, {}, KeyPath(str(_GENERAL)), {})
"""The stacks of published facts, which hold for any device and have no constants."""
SOFTWARE_FOLDER = _FOLDER / "stacks"
"""The folder of the files of stacks with constants, one for each generation of devices and software."""


def read_software(path: Path, bases: Mapping[str, Stack]) -> Stack:
    """Return the stack of a file of its own; raise ClusterError with file and key."""
    where = KeyPath(str(path))
    try:
        written = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(unread("the stack", path, error, "give a TOML file")) from None
    except tomllib.TOMLDecodeError as error:
        raise where.error(f"not a stack's TOML file: {error}") from None
    if "stacks" in written:
        raise where.error(
            "a cluster's file; a stack's own file has the keys of one of its [stacks.NAME], without this heading"
        )
    return read_stack(path.stem, _FILE(written, where), ATTENTION_KERNELS, where, bases)


def _all_software() -> dict[str, Stack]:
    """Return the stacks of the folder by name; one may be based on another whose name is earlier."""
    found: dict[str, Stack] = {}
    for path in sorted(SOFTWARE_FOLDER.glob("*.toml"), key=lambda path: path.stem):
        found[path.stem] = read_software(path, {**GENERAL, **found})
    return found


SOFTWARE: Mapping[str, Stack] = _all_software()
"""The stacks with constants, by name."""
STACKS: Mapping[str, Stack] = {**GENERAL, **SOFTWARE}


def holds_for(stack: Stack, device: str) -> bool:
    """Return whether the constants of a stack are of a device; a stack of a user's own is of the user's own devices."""
    return (
        not stack.devices
        or device in stack.devices
        or (stack.name not in SOFTWARE and not stacks_of(device))
    )


def stacks_of(device: str, *texts: str) -> tuple[str, ...]:
    """Return the names of the stacks with constants of a device; with `texts` the ones whose words are in one of them.

    Earlier texts decide before later ones, and in a text the longest word; a word behind "no" does not count.
    """
    here = [s for s in SOFTWARE.values() if device in s.devices]
    if not texts:
        return tuple(s.name for s in here)
    found: dict[str, None] = {}
    for text in texts:
        lengths = {
            s.name: max((len(w) for w in s.words if names(text, w)), default=0) for s in here
        }
        found |= dict.fromkeys(
            sorted((n for n in lengths if lengths[n]), key=lambda n: -lengths[n])
        )
    return tuple(found)
