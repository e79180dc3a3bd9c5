"""Record the machine, versions, time and command of results, so that somebody else can make them again."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from piper.api.ground.results import writing
from piper_ir.tools import machine_name, write_whole

PACKAGES = {"piper": "piper-training", "torch": "torch"}
"""The software whose version results may depend on, with the names of their distributions."""
GIT_S = 5.0
"""The seconds after which git is given up, on a slow file system."""


def save_origin(folder: Path, seed: int | None = None, file: Path | None = None) -> None:
    """Write origin.json: machine, versions, commit, seed, time and command; raise OutputError if that fails.

    `file` is the user's file, whose repository has the commit; by default that of the present folder.
    """
    origin = {
        "machine": _machine(),
        "versions": {"python": platform.python_version()}
        | {name: _version(of) for name, of in PACKAGES.items()},
        "commit": commit(Path.cwd() if file is None else file.resolve().parent),
        "seed": seed,
        "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
    with writing(folder):
        write_whole(folder / "origin.json", json.dumps(origin, indent=1))


def commit(folder: Path) -> str:
    """Return the commit of the repository that a folder is in, and whether it has changes; "" outside of one."""
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    if not head:
        return ""
    return head + (
        " with changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else ""
    )


def _git(folder: Path, *arguments: str) -> str:
    """Return the output of a git command; "" if there is no git, no repository, or no answer in time."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # a source tree on PYTHONPATH
        return "not installed"


def _machine() -> str:
    """Return the processor, and the devices if torch is loaded and has some."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return machine_name()
    return f"{machine_name()}; {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
