"""Read JSON and YAML files of options as flat names, each with its value and its line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from piper_interop.neutral.foreign import OptionValue
from piper_ir.ground.errors import JobError
from piper_ir.tools import unread

DEEPEST = 20
"""The levels of a file; a YAML file whose anchors refer to themselves has no end."""

_COMMENT = re.compile(r"^\s*//.*$", re.MULTILINE)


def read_text(source: str) -> str:
    """Return the text of a file; raise JobError if it cannot be read."""
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise JobError(unread("the file", source, error, "give one of JSON or YAML")) from None


def options_of(source: str) -> dict[str, OptionValue]:
    """Return the options of a JSON or YAML file by names joined with dots, such as "zero_optimization.stage".

    Numbers such as 5e8 are numbers in both forms, and lines that begin with "//" are comments. A mapping without keys
    is an option of its own. Raises JobError for a text that is no mapping, and for keys that stand twice.
    """
    name = Path(source).name
    # A tab within a JSON text is written as \t, so a tab of the file is always a space between values.
    text = _COMMENT.sub("", read_text(source).expandtabs())
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise JobError(f"{source} is neither JSON nor YAML: {error}") from None
    if not isinstance(root, yaml.MappingNode):
        raise JobError(f"{source} holds no options: an object of names and values is expected")
    return dict(_flat(root, (), name))


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Return flat names as objects within objects: the reverse of `options_of`."""
    root: dict[str, Any] = {}
    for name, value in values.items():
        *sections, key = name.split(".")
        section = root
        for part in sections:
            section = section.setdefault(part, {})
        section[key] = value
    return root


def setting(text: str) -> tuple[str, Any]:
    """Return the name and value of an option on a command line, such as "--bf16=true"; raise JobError without "="."""
    name, equals, value = text.removeprefix("--").partition("=")
    if not equals or not name:
        raise JobError(f"--set {text}: NAME=VALUE is expected")
    return name, _plain(value)


def _flat(
    node: yaml.MappingNode, above: tuple[str, ...], file: str
) -> Iterator[tuple[str, OptionValue]]:
    if len(above) > DEEPEST:
        raise JobError(f"{file}: {'.'.join(above[:3])}... has more than {DEEPEST} levels")
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        if not key or "." in key:
            raise JobError(f"{file}:{line}: a key without dots is expected, not {key!r}")
        if key in lines:
            raise JobError(f"{file}:{line}: {key} stands in line {lines[key]} already")
        lines[key] = line
        path = (*above, key)
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _flat(value_node, path, file)
        else:
            yield ".".join(path), OptionValue(_value(value_node, len(path), file), f"{file}:{line}")


def _value(node: yaml.Node, depth: int, file: str) -> Any:
    if depth > DEEPEST:
        raise JobError(f"{file}: a value has more than {DEEPEST} levels")
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, depth + 1, file) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _value(item, depth + 1, file) for key, item in node.value}
    assert isinstance(node, yaml.ScalarNode), "a document consists of scalars, lists and mappings"
    return node.value if node.style in ("'", '"') else _plain(node.value)


def _plain(text: str) -> Any:
    """Return the value of a text without quotes: a number, a truth value, None, a list, or the text itself."""
    readers: tuple[Callable[[str], Any], ...] = (json.loads, yaml.safe_load)
    for reader in readers:
        try:
            return reader(text)
        except (ValueError, yaml.YAMLError, RecursionError):
            continue
    return text
