"""Install other systems, each in an environment of its own, and let their parsers judge: `make interop`.

    make interop                      # all systems
    make interop ARGS=torchtitan      # one

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
    """

    variable: str
    alone: Sequence[str]
    packages: Sequence[str] = ()
    settings: Mapping[str, str] | None = None


SYSTEMS = {
    "torchtitan": Installed(
        "PIPER_TORCHTITAN_PYTHON",
        ("torchtitan==0.3.0", "spmd_types==0.2.3"),
        ("tyro", "tensorboard", "grain", "torchdata", "datasets", "einops", "transformers==5.23"),
    ),
    "deepspeed": Installed(
        "PIPER_DEEPSPEED_PYTHON",
        # Its build looks for torch, which an isolated build would install again.
        ("--no-build-isolation", "deepspeed==0.19.8"),
        ("hjson", "py-cpuinfo", "msgpack", "ninja", "psutil", "pydantic", "einops", "tqdm"),
        {"DS_BUILD_OPS": "0"},
    ),
    "accelerate": Installed(
        "PIPER_ACCELERATE_PYTHON",
        ("accelerate==1.15.0",),
        ("transformers==5.24.0", "psutil"),
    ),
}


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
    subprocess.run([*pip, "--no-deps", *system.alone], check=True, env=environment)
    if system.packages:
        subprocess.run([*pip, *system.packages], check=True, env=environment)
    done.write_text(repr(system))
    return python


def main(names: Sequence[str]) -> int:
    """Install the systems, run their tests, and return pytest's exit code."""
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        print(f"unknown system {unknown[0]}; known are {', '.join(SYSTEMS)}", file=sys.stderr)
        return 2
    chosen = names or tuple(SYSTEMS)
    found = {SYSTEMS[name].variable: str(interpreter(name)) for name in chosen}
    tests = [f"tests/interop/test_{name}_parser.py" for name in chosen]
    command = [sys.executable, "-m", "pytest", "-m", "", "-q", *tests]
    return subprocess.run(command, env=os.environ | found, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
