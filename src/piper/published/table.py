"""Read tables of published training steps: CSV files with the columns of COLUMNS, one run per row.

An empty field was not stated by its source. Lines that begin with # are comments. Further columns are kept and written
again.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, get_args

from piper_ir.ground.errors import JobError, PiperWarning
from piper_ir.tools import says, unread

Arch = Literal["gpt", "llama"]
ScheduleWord = Literal["none", "1f1b", "interleaved", "zb1p", "zb2p"]
RecomputedPart = Literal["none", "selective", "full"]
_WORDS: Mapping[str, tuple[str, ...]] = {
    "arch": get_args(Arch),
    "schedule": get_args(ScheduleWord),
    "recompute": get_args(RecomputedPart),
    "seq_parallel": ("yes", "no"),
    "tied": ("yes", "no"),
    "dtype": ("bf16", "fp16"),
}
"""The words that a column accepts."""
_COUNTS = ("hidden", "heads", "layers", "seq", "gpus", "tp", "pp", "cp", "dp", "ep", "global_batch")
"""The columns of counts that every row needs."""
_OPEN = (
    "ffn",
    "kv_heads",
    "vocab",
    "vpp",
    "micro_batch",
    "gpus_per_node",
    "experts",
    "top_k",
    "expert_ffn",
)
"""The columns of counts that a row may leave open."""
_FROM_ZERO = ("shared_experts", "dense_layers")
"""The columns of counts that may be 0."""
_OF_EXPERTS = ("expert_ffn", "shared_experts", "dense_layers", "capacity")
"""The columns that say something of experts alone."""
_SECONDS = ("capacity", "step_s", "peak_gib")
"""The columns of numbers that a row may leave open."""
ALIKE = 0.7
"""The likeness, as difflib counts it, from which an unknown column is taken for a misspelt one."""
PREDICTED = frozenset({
    "predicted_step_s", "low_step_s", "high_step_s", "predicted_peak_gib", "predicted_reserved_gib", "refused",
})  # fmt: skip
"""The columns that a table of predictions has beside the columns of its runs."""
GIB, GB = 2**30, 10**9
"""The bytes of a GiB, and of a decimal GB."""
COLUMNS = (
    "case", "source", "block", "arch", "hidden", "ffn", "heads", "kv_heads", "layers", "vocab", "seq", "tied", "hw",
    "gpus", "gpus_per_node", "tp", "pp", "vpp", "cp", "dp", "zero", "schedule", "micro_batch", "global_batch",
    "recompute", "seq_parallel", "dtype", "step_s", "peak_gib", "note",
    "experts", "top_k", "expert_ffn", "shared_experts", "dense_layers", "capacity", "ep",
)  # fmt: skip
"""The columns of a table; docs/accuracy.md explains each."""
_NEEDED = ("case", "arch", "hw", *(name for name in _COUNTS if name != "ep"))
DEFAULTS = {"block": "measured", "zero": "0", "schedule": "none", "recompute": "none"} | {
    "seq_parallel": "no", "tied": "no", "dtype": "bf16", "source": "", "note": "",
    "shared_experts": "0", "dense_layers": "0", "ep": "1",
}  # fmt: skip
"""The values of empty cells."""


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """Hold one published run.

    Attributes:
        case: its name.
        source: where it was published.
        block: "measured", or why it does not count in headline means.
        arch: gpt (LayerNorm, GELU, learned positions, biases) or llama (RMSNorm, SwiGLU, rotary positions).
        hidden: elements of a token's vector.
        ffn: width of the feed-forward part; 4 x hidden if it is open.
        heads: heads of queries.
        kv_heads: heads of keys and values; as many as of queries if it is open.
        layers: number of blocks.
        vocab: number of tokens, without padding; None if it is open.
        seq: tokens of a row.
        tied: whether embedding and head are one parameter.
        hw: name of the device.
        gpus: number of devices.
        gpus_per_node: devices of a node.
        tp, pp, vpp, cp, dp: degrees; vpp is chunks per pipeline rank.
        zero: states that are sharded over dp x cp: 0 none, 1 optimizer, 2 gradients, 3 parameters.
        schedule: the order of a pipeline.
        micro_batch: rows of a microbatch; None if it is open.
        global_batch: rows of a step.
        recompute: none, selective (attention), full (layers).
        seq_parallel: whether activations between products of tensor parallelism are sharded along tokens.
        dtype: of matrix products.
        step_s: seconds of an optimizer step, measured; None in a table of wishes.
        peak_gib: peak memory of the fullest rank, in units of `peak_unit` bytes; None if it was not published.
        note: caveats of the source in words.
        experts: experts of a layer; None for a dense model.
        top_k: experts that a token goes to.
        expert_ffn: width of an expert's feed-forward part; `ffn` if it is open.
        shared_experts: experts of this width that every token goes through.
        dense_layers: the first layers, which have no experts.
        capacity: places of an expert over the tokens that it would get if all got equally many; None is dropless.
        ep: devices that share the experts, a part of the dp replicas.
        stack: name of the software stack, from a column of that name; "" leaves the choice to Piper.
        software: name and words of the stack that `row` has taken; "" before that.
        unread: why a cell cannot be read; all values but case, source and block are then without meaning.
        fields: the row as it stands in the file.
    """

    case: str
    source: str
    block: str
    arch: Arch
    hidden: int
    ffn: int | None
    heads: int
    kv_heads: int | None
    layers: int
    vocab: int | None
    seq: int
    tied: bool
    hw: str
    gpus: int
    gpus_per_node: int | None
    tp: int
    pp: int
    vpp: int | None
    cp: int
    dp: int
    zero: int
    schedule: ScheduleWord
    micro_batch: int | None
    global_batch: int
    recompute: RecomputedPart
    seq_parallel: bool
    dtype: str
    step_s: float | None
    peak_gib: float | None
    note: str
    experts: int | None = None
    top_k: int | None = None
    expert_ffn: int | None = None
    shared_experts: int = 0
    dense_layers: int = 0
    capacity: float | None = None
    ep: int = 1
    stack: str = ""
    software: str = ""
    unread: str = ""
    fields: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def text(self) -> str:
        """Return source and note, in which words name the software."""
        return f"{self.source}; {self.note}"

    @property
    def peak_unit(self) -> int:
        """Return the bytes of one of `peak_gib`: of a decimal gigabyte, where the note says that GB were printed."""
        return GB if self.says("printed in GB") else GIB

    def says(self, words: str) -> bool:
        """Return whether the note has some words, without a "no", "not" or "without" before them."""
        return says(self.note, words)

    @property
    def publisher(self) -> str:
        """Return the first words of the source, by which tables group rows."""
        return self.source.partition(";")[0].partition(" (")[0].strip() or "(no source)"


def read_rows(path: Path, only: str = "*") -> list[PublishedRow]:
    """Return the rows of a table whose case fits the pattern `only`; of one with a cell that cannot be read, why.

    Raises JobError if the table has no such columns, if no row fits, and if none of these can be read.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        advice = "docs/accuracy.md says how a table of published runs is written"
        raise JobError(unread("the table", path, error, advice)) from None
    numbered = [
        (n, x) for n, x in enumerate(lines, 1) if x.strip() and not x.lstrip().startswith("#")
    ]
    reader = csv.DictReader([x for _, x in numbered])
    try:
        columns, records = list(reader.fieldnames or ()), [(reader.line_num, f) for f in reader]
    except csv.Error as error:  # a cell of more than 128 KiB
        raise JobError(
            f"{path}: near line {numbered[min(reader.line_num, len(numbered) - 1)][0]}: {error}"
        ) from None
    if not columns:
        raise JobError(f"{path}: the table is empty; docs/accuracy.md lists its columns")
    missing = [name for name in _NEEDED if name not in columns]
    if missing and len(columns) == 1 and (mark := next((m for m in ";\t|" if m in columns[0]), "")):
        raise JobError(
            f"{path}: the cells are separated by {mark!r}; separate them by commas, with a point in numbers"
        )
    plain = {name.strip().lower().replace(" ", "_"): name for name in columns if name}
    known = {*COLUMNS, "stack"}
    if near := [(n, as_is) for n, as_is in plain.items() if n in known and as_is not in known]:
        raise JobError(f"{path}: the column {near[0][1]!r} is called {near[0][0]!r}; write it so")
    for name in sorted(known.difference(columns)):
        # low_step_s, as `--out` writes it, is no misspelt step_s
        others = [c for c in columns if c not in known and not c.endswith(f"_{name}")]
        if close := get_close_matches(name, others, 1, ALIKE):
            raise JobError(
                f"{path}: the column {close[0]!r} is not known, and there is none called {name!r}: if it is that, call "
                f"it so; else add the column {name}, empty if you like"
            )
    if missing:
        raise JobError(
            f"{path}: not among its columns: {', '.join(missing)}; docs/accuracy.md lists the columns of a table"
        )
    if twice := [name for name in dict.fromkeys(columns) if columns.count(name) > 1]:
        raise JobError(f"{path}: two columns are called {twice[0]!r}; leave one out")
    unread_columns = [c for c in columns if c and c not in known and c not in PREDICTED]
    if unread_columns:
        text = f"{path}: columns {', '.join(unread_columns)}: not read; docs/accuracy.md lists the columns that are"
        warnings.warn(text, PiperWarning, stacklevel=2)
    rows = []
    for number, fields in records:
        if not any(fields.values()):
            continue
        where = f"line {numbered[number - 1][0]}"
        try:
            if None in fields:
                raise JobError(f"{where}: more cells than the {len(columns)} columns of the table")
            if None in fields.values():
                raise JobError(f"{where}: fewer cells than the {len(columns)} columns of the table")
            rows.append(read_row(fields, where))
        except JobError as error:
            rows.append(_unread_row(fields, str(error)))
    names = [row.case for row in rows if not row.unread]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise JobError(f"{path}: two rows have the case {twice[0]!r}; give each a name of its own")
    chosen = [row for row in rows if row.case == only] or [
        row for row in rows if fnmatch(row.case, only)
    ]
    if not chosen:
        first = f"the first are {', '.join(names[:3])}" if names else "the table has no rows"
        one = "; it is one name or one pattern, such as 'llama-*'" if "," in only else ""
        raise JobError(f"{path}: no case fits {only!r}{one}; {first}")
    if all(row.unread for row in chosen):
        raise JobError(f"{path}, {chosen[0].unread}")
    return chosen


def _unread_row(fields: Mapping[Any, Any], reason: str) -> PublishedRow:
    """Return a row with its names alone."""
    texts = {k: (v or "").strip() for k, v in fields.items() if k is not None}
    names = ("case", "source", "block", "note")
    values: dict[str, Any] = {k: texts.get(k) or DEFAULTS.get(k, "") for k in names}
    values |= dict.fromkeys(_COUNTS, 1) | dict.fromkeys((*_OPEN, *_SECONDS))
    values |= {"arch": "llama", "hw": "", "tied": False, "zero": 0, "schedule": "none"}
    values |= {"recompute": "none", "seq_parallel": False, "dtype": "bf16"}
    return PublishedRow(**values, unread=reason, fields=texts)


def read_row(fields: Mapping[str, str | None], where: str = "row") -> PublishedRow:
    """Return a row from its fields as text; raise JobError with `where` and the column."""
    texts = {k: (v or "").strip() for k, v in fields.items() if k is not None}
    said = {k: texts.get(k) or DEFAULTS.get(k, "") for k in COLUMNS}
    said |= {name: said[name].lower() for name in _WORDS}
    said["block"] = "measured" if said["block"].lower() == "measured" else said["block"]
    said["zero"] = said["zero"].removesuffix(".0")
    if not said["case"]:
        raise JobError(f"{where}: case is empty; give each row a name of its own")
    for name, words in _WORDS.items():
        if said[name] not in words:
            raise JobError(f"{where}: {name} is {said[name]!r}; accepted are {', '.join(words)}")
    if said["zero"] not in ("0", "1", "2", "3"):
        raise JobError(f"{where}: zero is {said['zero']!r}; accepted are 0, 1, 2 and 3")
    counts = {name: _count(said[name], f"{where}: {name}", open_=False) for name in _COUNTS}
    counts |= {n: _count(said[n], f"{where}: {n}", open_=False, least=0) for n in _FROM_ZERO}
    open_counts = {name: _count(said[name], f"{where}: {name}", open_=True) for name in _OPEN}
    numbers = {name: _number(said[name], f"{where}: {name}") for name in _SECONDS}
    plain = {name: said[name] for name in ("case", "source", "block", "hw", "note")}
    flags = {name: said[name] == "yes" for name in ("tied", "seq_parallel")}
    chosen = {name: said[name] for name in ("arch", "schedule", "recompute", "dtype")}
    values: dict[str, Any] = {**counts, **open_counts, **numbers, **plain, **flags, **chosen}
    if (values["experts"] is None) != (values["top_k"] is None):
        raise JobError(f"{where}: experts and top_k are given together, or neither")
    if values["experts"] is None and (of_experts := [n for n in _OF_EXPERTS if values[n]]):
        name = of_experts[0]
        raise JobError(
            f"{where}: {name} is {texts[name]!r}, and the row has no experts: give experts and top_k, or leave it empty"
        )
    return PublishedRow(
        **values, zero=int(said["zero"]), stack=texts.get("stack", ""), fields=texts
    )


def _count(text: str, where: str, *, open_: bool, least: int = 1) -> int | None:
    if not text and open_:
        return None
    text = text.removesuffix(".0")  # as a column of integers with empty cells is written by pandas
    if not text.isdecimal() or int(text) < least:
        empty = ", or nothing" if open_ else ""
        raise JobError(f"{where} is {text!r}; an integer of at least {least} is needed{empty}")
    return int(text)


def _number(text: str, where: str) -> float | None:
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise JobError(f"{where} is {text!r}; a number above 0 is needed, or nothing")
    return number


def write_rows(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Write rows as a CSV file with all their columns."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
