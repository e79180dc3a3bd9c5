"""Read a configuration of torchtitan: by torchtitan's own parser, or from a file with a kept answer.

torchtitan's recipes are Python functions, which torchtitan alone can run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from piper_interop.neutral.foreign import Foreign, OptionValue
from piper_interop.neutral.system import Asked
from piper_interop.torchtitan import ask
from piper_interop.torchtitan.model import parts_of
from piper_ir.ground.errors import JobError
from piper_ir.tools import unread

Json = dict[str, Any]
LIMIT_S = 300
"""The longest time that torchtitan's parser may take; it imports torch and its own models."""


def read(source: str, asked: Asked) -> Foreign:
    """Return a configuration's options, resolved by torchtitan.

    Args:
        source: the name of a recipe, such as "llama3_70b" or "llama3:llama3_70b", or a JSON file that `ask.py` printed.
        asked: `sets` are further options, `python` is the interpreter that has torchtitan.

    Raises JobError if torchtitan is not there, refuses the options, or the file is none of its answers.
    """
    path = Path(source)
    if path.suffix == ".json":
        answer = _kept(path, asked)
    else:
        answer = _asked(_recipe(source, asked.python), asked)
    return of_answer(answer, source)


def of_answer(answer: Json, source: str) -> Foreign:
    """Return the options of an answer of `ask.py`."""
    config, defaults = answer["config"], set(answer["defaults"])
    values = {
        name: OptionValue(value, "" if name in defaults else source, name in defaults)
        for name, value in _options(config)
    }
    spec = config.get("model_spec") or {}
    parts = parts_of(spec)
    values |= {f"model.{name}": OptionValue(value, source) for name, value in parts.options.items()}
    facts = {"sizes": parts.sizes, "layers": parts.layers, "parameters": answer["parameters"]}
    facts["float8"] = parts.float8
    return Foreign("torchtitan", answer["version"], source, values, facts)


def _options(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the full name and the value of each option; a choice of a class is an option with the class's name."""
    for name, value in config.items():
        if prefix + name == "model_spec" or name == "__class__":
            continue
        if isinstance(value, Mapping) and "__class__" in value:
            yield f"{prefix}{name}", _short(value["__class__"])
            yield from _options(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _short(kind: str) -> str:
    """Return a class's name without its module: "FullAC" of "torchtitan....activation_checkpoint.FullAC.Config"."""
    return kind.removesuffix(".Config").rpartition(".")[2]


def _recipe(source: str, python: str) -> tuple[str, str]:
    """Return the module and the name of a recipe."""
    module, colon, name = source.partition(":")
    if colon:
        return module, name
    registry = _run(["--list"], python)["registry"]
    modules = [module for module, name in registry if name == source]
    if not modules:
        names = ", ".join(sorted(name for _, name in registry))
        raise JobError(f"{source}: torchtitan has no such configuration; it has {names}")
    return modules[0], source


def _asked(recipe: tuple[str, str], asked: Asked) -> Json:
    module, name = recipe
    return _run(["--module", module, "--config", name, *map(_word, asked.sets)], asked.python)


def _word(text: str) -> str:
    """Return `NAME=VALUE` as torchtitan's command line takes it: a switch is its name, or "no-" before it.

    A word without "=" is a value of the option before it, or the kind of a part: "activation-checkpoint:full".
    """
    name, equals, value = text.partition("=")
    if not equals:
        return text
    section, dot, option = name.removeprefix("--").rpartition(".")
    if value.lower() in ("true", "false"):
        return f"--{section}{dot}{'' if value.lower() == 'true' else 'no-'}{option}"
    return f"--{name.removeprefix('--')}={value}"


def every(python: str) -> Json:
    """Return the answer of every recipe of an installed torchtitan, or why there is none, by "module:name"."""
    return _run(["--every"], python)


def _run(arguments: list[str], python: str) -> Json:
    """Return the answer of `ask.py` in the interpreter that has torchtitan."""
    command = [python or sys.executable, ask.__file__, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except OSError as e:
        raise JobError(
            f"--python {python}: {e.strerror}; name an interpreter that has torchtitan"
        ) from None
    except subprocess.TimeoutExpired:
        raise JobError(f"torchtitan's parser took more than {LIMIT_S} s and was ended") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith(ask.MARK)]
    if done.returncode == 0 and lines:
        answer: Json = json.loads(lines[-1].removeprefix(ask.MARK))
        return answer
    told = (done.stderr.strip() or done.stdout.strip()).splitlines()
    last = _reason(told) or f"exit code {done.returncode}"
    if "No module named 'torchtitan'" in last:
        raise JobError(
            f"{command[0]} has no torchtitan, whose recipes are code; install it there (pip install torchtitan), name "
            f"another interpreter with --python, or give a JSON file that `{Path(ask.__file__).name}` printed in one"
        )
    raise JobError(f"torchtitan refuses {' '.join(arguments)}: {last}")


def _reason(lines: list[str]) -> str:
    """Return the last line, or the first part of the box that torchtitan's parser draws around its reason."""
    boxed = [line[1:-1].strip() for line in lines if line.startswith("│") and line.endswith("│")]
    first = takewhile(lambda text: text.strip("─"), boxed)
    return " ".join(first) or (lines[-1] if lines else "")


def _kept(path: Path, asked: Asked) -> Json:
    """Return an answer that was kept in a file."""
    if asked.sets:
        raise JobError(
            f"{path} holds a resolved configuration, which --set cannot change; give the recipe's name"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        advice = "give a recipe's name or a file that ask.py printed"
        raise JobError(unread("the recipe", path, e, advice)) from None
    lines = text.splitlines()
    marked = [line for line in lines if line.startswith(ask.MARK)]
    try:
        answer = json.loads(marked[-1].removeprefix(ask.MARK) if marked else text)
    except (ValueError, RecursionError) as e:
        raise JobError(f"{path} is no JSON: {e}") from None
    needed = ("version", "config", "defaults", "parameters")
    if not isinstance(answer, dict) or any(name not in answer for name in needed):
        raise JobError(
            f"{path} has no {', '.join(needed)}; a file that ask.py of piper_interop printed is needed"
        )
    return answer
