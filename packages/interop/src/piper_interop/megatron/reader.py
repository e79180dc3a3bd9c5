"""Read a job of Megatron-LM: a text of options, a file of them, a shell script, or YAML."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from piper_interop.megatron import words
from piper_interop.megatron.scripts.shell import JobCommand, Token, launch
from piper_interop.megatron.table import TABLE
from piper_interop.neutral.foreign import Foreign, OptionValue
from piper_interop.neutral.options import Ignored, row_of
from piper_interop.neutral.system import Asked
from piper_ir.ground.errors import JobError
from piper_ir.tools import count_text, unread

_OPTION = re.compile(r"--[A-Za-z]")
_MANY = re.compile(r"(ARGS|ARGUMENTS|OPTIONS|OPTS|FLAGS|PARAMS)\b", re.IGNORECASE)
_INVERTED = {
    "add-bias-linear": "disable-bias-linear",
    "add-position-embedding": "no-position-embedding",
    "apply-rope-fusion": "no-rope-fusion",
    "bias-gelu-fusion": "no-bias-gelu-fusion",
    "bias-swiglu-fusion": "no-bias-swiglu-fusion",
    "bias-dropout-fusion": "no-bias-dropout-fusion",
    "masked-softmax-fusion": "no-masked-softmax-fusion",
    "gradient-accumulation-fusion": "no-gradient-accumulation-fusion",
    "overlap-p2p-comm": "no-overlap-p2p-communication",
    "perform-initialization": "no-initialization",
    "share-embeddings-and-output-weights": "untie-embeddings-and-output-weights",
}
"""The names to which YAML gives false where the command line has an option of its own."""


@dataclass
class WrittenOption:
    """Hold one option as it was written.

    Attributes:
        name: without dashes in front, and with dashes for underscores.
        tokens: the words behind it.
        origin: the file and line.
        condition: the line of the condition under which it stands; 0 for none.
    """

    name: str
    tokens: list[Token]
    origin: str
    condition: int = 0


def read(source: str, asked: Asked) -> Foreign:
    """Return the options of a job with their values, and the defaults of the ones that a description reads.

    `source` is a text that begins with an option, or the path of a file. Raises JobError, all at once, for values that
    an option does not take and for parts of a script that cannot be known.
    """
    started: JobCommand | None = None
    if _OPTION.match(source.lstrip()):
        label, options = "options", list(_options(_split(source, "options", 0), "options"))
    else:
        label, text = _text_of(source)
        if label.endswith((".yaml", ".yml")):
            options = list(_of_yaml(text, label))
        elif _is_arguments(text):
            tokens = [
                t for n, line in enumerate(text.splitlines(), 1) for t in _split(line, label, n)
            ]
            options = list(_options(tokens, label))
        else:
            started = launch(text, label)
            options = list(_options(started.after, label))
    options += _options([t for text in asked.sets for t in _split(text, "--set", 0)], "--set")
    values = _values(options, label, asked.skip_unknown)
    facts = _facts(source, started, asked)
    if started:
        values["program"] = OptionValue(facts["program"], f"{label}:{started.line}")
    return Foreign("megatron", "", label, values, facts)


def _text_of(source: str) -> tuple[str, str]:
    path = Path(source)
    try:
        return str(path), path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(
            unread(
                "the script or file of options",
                source,
                error,
                'it is no text of options either, such as "--num-layers 32 --hidden-size 4096"',
            )
        ) from None


def _is_arguments(text: str) -> bool:
    """Return whether the first line that says something begins with an option."""
    lines = (line.strip() for line in text.splitlines())
    return _OPTION.match(next((line for line in lines if line and line[0] != "#"), "")) is not None


def _split(text: str, label: str, line: int) -> list[Token]:
    try:
        return [Token(word, line) for word in shlex.split(text, comments=line > 0)]
    except ValueError as error:
        raise JobError(f"{label}{_behind(line)}: {error}; close the quote") from None


def _behind(line: int) -> str:
    return f":{line}" if line else ""


def _options(tokens: Sequence[Token], label: str) -> Iterator[WrittenOption]:
    """Yield the options of a command's words; raise JobError for a word that no option stands before."""
    option: WrittenOption | None = None
    for token in tokens:
        if token.text.startswith("--"):
            if option:
                yield option
            name, given, value = token.text[2:].partition("=")
            origin = f"{label}{_behind(token.line)}"
            first = [replace(token, text=value)] if given else []
            option = WrittenOption(name.replace("_", "-"), first, origin, token.condition)
        elif option is None:
            if not token.text.strip():
                continue
            raise JobError(f"{label}{_behind(token.line)}: {token.text!r} stands behind no option")
        elif token.text:
            option.tokens.append(token)
    if option:
        yield option


def _of_yaml(text: str, label: str) -> Iterator[WrittenOption]:
    """Yield the options of a YAML file: the ones below MODEL_ARGS of a functional test, else all of them."""
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise JobError(f"{label}: no YAML: {' '.join(str(error).split())}") from None
    arguments = data.get("MODEL_ARGS", data) if isinstance(data, dict) else None
    if not isinstance(arguments, dict) or not arguments:
        raise JobError(f"{label}: a mapping of options is needed, or MODEL_ARGS with one")
    lines = _lines_of_keys(text)
    for key, value in arguments.items():
        yield from _of_key(str(key), value, label, lines)


def _of_key(key: str, value: Any, label: str, lines: dict[str, int]) -> Iterator[WrittenOption]:
    line = lines.get(key, 0)
    if isinstance(value, dict):
        for inner, more in value.items():
            yield from _of_key(str(inner), more, label, lines)
        return
    name = key.removeprefix("--").replace("_", "-")
    if name in _INVERTED and isinstance(value, bool):
        name, value = _INVERTED[name], not value
    if value is None or (value is False and row_of(TABLE, name)):
        return
    given = [] if value is True else value if isinstance(value, list) else [value]
    texts = [text for item in given for text in _texts(item, many=isinstance(value, list))]
    yield WrittenOption(name, [Token(text, line) for text in texts], f"{label}{_behind(line)}")


def _texts(item: Any, *, many: bool) -> list[str]:
    """Return the words of a value; in a list, or a text such as "[attn mlp]" or "[mlp]", they stand between blanks."""
    text = str(item)
    words = " " in text or text[1:-1].isidentifier()
    if many or (words and text[0] + text[-1] == "[]"):
        return text.strip("[]").split()
    return [text]


def _lines_of_keys(text: str) -> dict[str, int]:
    """Return the line of each key that stands first in a line."""
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        key, colon, _ = line.strip().partition(":")
        if colon:
            lines[key.strip("'\"")] = number
    return lines


def _values(
    options: Sequence[WrittenOption], label: str, skip_unknown: bool
) -> dict[str, OptionValue]:
    """Return the value of each option; a later one stands for an earlier one, as in Megatron's parser."""
    values = {name: OptionValue(value, default=True) for name, value in words.defaults().items()}
    problems = []
    for option in {option.name: option for option in options}.values():
        rows = row_of(TABLE, option.name)
        aside = (len(rows) == 1 and isinstance(rows[0], Ignored)) or (skip_unknown and not rows)
        if option.condition and aside:
            continue
        if problem := _unknown(option, aside=aside or option.name in words.FILES):
            problems.append(problem)
            continue
        try:
            value = words.value_of(option.name, [token.text for token in option.tokens])
        except words.WrongValueError as error:
            shown = " ".join([f"--{option.name}", *(token.text for token in option.tokens)])
            problems.append(f"{option.origin}: {shown}: {error}")
            continue
        values[option.name] = OptionValue(value, option.origin)
    if problems:
        told = count_text(len(problems), "option")
        raise JobError("\n  ".join([f"{label}: {told} cannot be read", *problems]))
    return values


def _unknown(option: WrittenOption, *, aside: bool) -> str:
    """Return the complaint about an option whose words or presence cannot be told; "" if there is none."""
    if option.condition:
        return (
            f"{option.origin}: --{option.name} stands under the condition in line {option.condition}, which cannot be "
            f"told here; give it with --set, or take it out"
        )
    unknown = next((token for token in option.tokens if token.unknown or token.condition), None)
    if unknown is None or (aside and len(option.tokens) == 1 and not _MANY.search(unknown.unknown)):
        return ""
    shown = " ".join(token.text for token in option.tokens)
    return (
        f"{option.origin}: --{option.name} {shown}: nothing here says what that is (line {unknown.line}); write it out, "
        "or set the variable in a line NAME=value"
    )


def _facts(source: str, started: JobCommand | None, asked: Asked) -> dict[str, Any]:
    """Return the devices, None if nobody says them, the program, and a name for the job."""
    devices = asked.devices if asked.devices is not None else _devices(started)
    program = Path(started.program).name if started else ""
    path = Path(source) if not _OPTION.match(source.lstrip()) else None
    name = "megatron" if path is None else path.stem
    if path is not None and path.name == "model_config.yaml":
        name = path.absolute().parent.name
    return {"devices": devices, "program": program, "name": name}


def _devices(started: JobCommand | None) -> int | None:
    """Return the devices that the launcher's options say."""
    if started is None:
        return None
    given = {"nnodes": "1"}
    for token, following in pairwise([*started.before, Token("", 0)]):
        name, joined, value = token.text.removeprefix("--").partition("=")
        given[name.replace("_", "-")] = value if joined else following.text
    counts = [given.get(name, "") for name in ("nproc-per-node", "nnodes")]
    return math.prod(map(int, counts)) if all(count.isdigit() for count in counts) else None
