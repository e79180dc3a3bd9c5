"""Install other systems, each in an environment of its own, and let their parsers judge: `make interop`.

    make interop                      # all systems
    make interop ARGS=torchtitan      # one

Megatron-LM is no package: with PIPER_MEGATRON (a checkout) and PIPER_MEGATRON_PYTHON (an interpreter of Python 3.12 with
torch, triton, einops and packaging) its tests run, too.

An environment sees the packages of `.venv`, so that torch is not installed again. A test of tests/interop skips unless the
variable of its system names the interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HOME = Path("build") / "interop"


@dataclass(frozen=True)
class Installed:
    """Say how a system is installed.

    Attributes:
        variable: names the interpreter for the tests.
        alone: packages that are installed without what they require.
        packages: further packages, with what they require.
        settings: environment variables of the installation.
        build: packages that must be there before any of the others is built.
    """

    variable: str
    alone: Sequence[str]
    packages: Sequence[str] = ()
    settings: Mapping[str, str] | None = None
    build: Sequence[str] = ()


SYSTEMS = {
    "torchtitan": Installed(
        "PIPER_TORCHTITAN_PYTHON",
        ("torchtitan==0.3.0", "spmd_types==0.2.3", "torchao==0.18.0"),
        (
            "tyro",
            "tensorboard",
            "grain",
            "torchdata",
            "datasets",
            "einops",
            "transformers==5.23",
            "triton",
        ),
    ),
    "deepspeed": Installed(
        "PIPER_DEEPSPEED_PYTHON",
        # Its build looks for torch, which an isolated build would install again.
        ("--no-build-isolation", "deepspeed==0.19.8"),
        ("hjson", "py-cpuinfo", "msgpack", "ninja", "psutil", "pydantic", "einops", "tqdm"),
        {"DS_BUILD_OPS": "0"},
        ("setuptools",),  # an environment of Python 3.11 begins with one that makes no wheels
    ),
    "accelerate": Installed(
        "PIPER_ACCELERATE_PYTHON",
        ("accelerate==1.15.0",),
        ("transformers==5.24.0", "psutil"),
    ),
}

MEGATRON = "megatron"
"""The system that is a checkout, not a package."""


def interpreter(name: str) -> Path:
    """Return the interpreter of a system's environment, which is made if it is not there."""
    system, home = SYSTEMS[name], (HOME / name).absolute()
    python = home / "bin" / "python"
    done = home / ".installed"
    if done.exists() and done.read_text() == repr(system):
        return python
    venv.create(home, clear=True, with_pip=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    shared = home / "lib" / version / "site-packages" / "piper-venv.pth"
    shared.write_text(sysconfig.get_path("purelib") + "\n")
    pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-input"]
    environment = os.environ | dict(system.settings or {})
    if system.build:
        pinned = ["--upgrade", "-c", "constraints.txt", *system.build]
        subprocess.run([*pip, *pinned], check=True, env=environment)
    subprocess.run([*pip, "--no-deps", *system.alone], check=True, env=environment)
    if system.packages:
        subprocess.run([*pip, *system.packages], check=True, env=environment)
    done.write_text(repr(system))
    return python


def main(names: Sequence[str]) -> int:
    """Install the systems, run their tests, and return pytest's exit code."""
    known = (*SYSTEMS, MEGATRON)
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"unknown system {unknown[0]}; known are {', '.join(known)}", file=sys.stderr)
        return 2
    chosen = names or known
    found = {SYSTEMS[name].variable: str(interpreter(name)) for name in chosen if name in SYSTEMS}
    tests = [f"tests/interop/test_{name}_parser.py" for name in chosen]
    command = [sys.executable, "-m", "pytest", "-m", "", "-q", *tests]
    return subprocess.run(command, env=os.environ | found, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
