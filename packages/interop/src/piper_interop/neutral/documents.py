"""Read JSON and YAML files of options as flat names, each with its value and its line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from piper_interop.neutral.foreign import OptionValue
from piper_ir.ground.errors import JobError
from piper_ir.tools import unread

DEEPEST = 20
"""The levels of a file; a YAML file whose anchors refer to themselves has no end."""

MOST = 10_000
"""The items of one value; aliases of aliases can make a short file endless."""

_MERGE = "tag:yaml.org,2002:merge"

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
    is an option of its own. Keys "<<" merge mappings. Raises JobError for a text that is no mapping, and for keys that
    stand twice.
    """
    name = Path(source).name
    # A tab within a JSON text is written as \t, so a tab of the file is always a space between values.
    text = _COMMENT.sub("", read_text(source).expandtabs())
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise JobError(f"{source} is neither JSON nor YAML: {why}") from None
    if not isinstance(root, yaml.MappingNode):
        raise JobError(f"{source} holds no options: an object of names and values is expected")
    found = dict(islice(_flat(root, (), name), MOST + 1))
    if len(found) > MOST:
        raise JobError(f"{source} has more than {MOST:,} options")
    return found


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
    for key_node, value_node in _entries(node, len(above), file):
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
            value = _value(value_node, len(path), f"{file}:{line}", iter(range(MOST)))
            yield ".".join(path), OptionValue(value, f"{file}:{line}")


def _entries(node: yaml.MappingNode, depth: int, file: str) -> list[tuple[yaml.Node, yaml.Node]]:
    """Return the keys and values of a mapping and of the mappings that it merges; of equal keys its own holds."""
    if depth > DEEPEST:
        raise JobError(f"{file}: a mapping merges others over more than {DEEPEST} levels")
    own = [(key, value) for key, value in node.value if key.tag != _MERGE]
    known = {key.value for key, _ in own if isinstance(key, yaml.ScalarNode)}
    for key, value in node.value:
        if key.tag != _MERGE:
            continue
        for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            if not isinstance(merged, yaml.MappingNode):
                raise JobError(f"{file}:{key.start_mark.line + 1}: << merges mappings alone")
            more = [e for e in _entries(merged, depth + 1, file) if e[0].value not in known]
            known.update(key.value for key, _ in more)
            own += more
    return own


def _value(node: yaml.Node, depth: int, at: str, left: Iterator[int]) -> Any:
    """Return the value of a node, whose items are counted down in `left`."""
    if depth > DEEPEST:
        raise JobError(f"{at}: a value has more than {DEEPEST} levels")
    if next(left, None) is None:
        raise JobError(f"{at}: a value has more than {MOST:,} items")
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, depth + 1, at, left) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _value(item, depth + 1, at, left) for key, item in node.value}
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
