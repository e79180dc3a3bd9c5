"""Report the devices, backends and versions of this machine that Piper can use, and the missing ones."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, packages_distributions, version
from pathlib import Path

from piper_ir.tools import usable_cores

DISTRIBUTION = "piper-training"
LIBRARIES = {
    "optuna": "piper tune",
    "ray": 'launcher "ray"',
    "pandas": "reports",
    "matplotlib": "figures of reports",
    "tensorboard": "--log tensorboard (optional)",
    "wandb": "--log wandb (optional)",
}
"""The distributions, each with the feature that needs it."""


@dataclass(frozen=True)
class Finding:
    """Hold one line of the report.

    Attributes:
        state: "ok", "missing" (something cannot be done; `text` says how to change that) or "absent" (nobody needs it).
        text: The result.
    """

    name: str
    state: str
    text: str


def examine() -> list[Finding]:
    """Examine this machine, which takes a second or two, since torch is imported."""
    return [
        _python(),
        _names(),
        _cores(),
        _memory(),
        *_torch(),
        *_libraries(),
        _shared_memory(),
        *_launchers(),
    ]


def _python() -> Finding:
    good = sys.version_info >= (3, 11)
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding(
        "python", "ok" if good else "missing", text if good else f"{text}; 3.11 or newer is needed"
    )


def _names() -> Finding:
    """Find other distributions with the import name or the command `piper`.

    The one that was installed last wins, file by file.
    """
    others = set(packages_distributions().get("piper", ())) | {
        script.dist.name
        for script in entry_points(group="console_scripts", name="piper")
        if script.dist is not None
    }
    if others := others - {DISTRIBUTION}:
        listed = " ".join(sorted(others))
        return Finding(
            "names", "missing", f"{listed} has the import name or the command piper, too: pip uninstall {listed}, "
                                f"then install {DISTRIBUTION} again"
        )  # fmt: skip
    command, ours = shutil.which("piper"), Path(sys.executable).with_name("piper")
    if command is not None and not (ours.exists() and ours.samefile(command)):
        return Finding(
            "names", "missing", f"the command piper on PATH is {command}, not of this Python ({sys.executable}): "
                                f"activate its environment, or use python -m piper"
        )  # fmt: skip
    return Finding("names", "ok", "the import name piper and the command are Piper's alone")


def _cores() -> Finding:
    return Finding("cpu", "ok", f"{usable_cores()} cores; a run on CPUs wants one per rank")


def _memory() -> Finding:
    info = Path("/proc/meminfo")
    if not info.is_file():
        return Finding("memory", "absent", "not known on this system")
    kib = {
        line.split(":")[0]: int(line.split()[1])
        for line in info.read_text().splitlines()
        if line.endswith("kB")
    }
    gib = {name: kib.get(name, 0) / 2**20 for name in ("MemTotal", "MemAvailable")}
    return Finding(
        "memory", "ok", f"{gib['MemTotal']:.1f} GiB, {gib['MemAvailable']:.1f} GiB of it free"
    )


def _torch() -> list[Finding]:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as e:
        return [Finding("torch", "missing", f"{e}; pip install torch")]
    findings = [Finding("torch", "ok", torch.__version__)]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(i)
            findings.append(
                Finding(
                    f"cuda:{i}",
                    "ok",
                    f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}",
                )
            )
    else:
        built = (
            f"this torch is built for CUDA {torch.version.cuda}"
            if torch.version.cuda
            else "this torch is built without CUDA"
        )
        findings.append(Finding("cuda", "absent", f"no device; {built}. Plans run on CPUs"))
    available: dict[str, Callable[[], bool]] = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
    }
    for name, is_there in available.items():
        there = dist.is_available() and is_there()
        needed = name == "gloo"
        text = (
            "available"
            if there
            else "not in this torch" + ("; ranks on CPUs cannot communicate" if needed else "")
        )
        findings.append(Finding(name, "ok" if there else "missing" if needed else "absent", text))
    return findings


def _libraries() -> list[Finding]:
    findings = []
    for name, use in LIBRARIES.items():
        try:
            findings.append(Finding(name, "ok", f"{version(name)}, for {use}"))
        except PackageNotFoundError:
            optional = "(optional)" in use
            findings.append(
                Finding(
                    name,
                    "absent" if optional else "missing",
                    f"not installed, for {use}; pip install {name}",
                )
            )
    return findings


def _shared_memory() -> Finding:
    """Examine shared memory, where Ray's object store and the launcher's watch over its workers live."""
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding(
            "shared memory",
            "absent",
            "/dev/shm is not there; files in the temporary folder are used",
        )
    facts = os.statvfs(path)
    return Finding(
        "shared memory", "ok", f"{facts.f_bavail * facts.f_frsize / 2**30:.1f} GiB free in {path}"
    )


def _launchers() -> list[Finding]:
    ray = os.environ.get("RAY_ADDRESS")
    joined = (
        f"joins the cluster at {ray} (RAY_ADDRESS)"
        if ray
        else "starts a local Ray for each run, unless --address names a cluster"
    )
    try:
        version("ray")
        ray_finding = Finding("launcher ray", "ok", joined)
    except PackageNotFoundError:
        ray_finding = Finding(
            "launcher ray",
            "missing",
            'without Ray use launcher "processes", on this machine or under torchrun',
        )
    return [
        ray_finding,
        Finding(
            "launcher processes", "ok", "one process per rank on this machine; also under torchrun"
        ),
    ]


def text(findings: list[Finding]) -> str:
    """Return the findings for people, a line each."""
    wide = max(len(f.name) for f in findings)
    lines = [f"{f.name:<{wide}}  {f.state:<7}  {f.text}" for f in findings]
    missing = [f.name for f in findings if f.state == "missing"]
    return "\n".join(
        [*lines, f"missing: {', '.join(missing)}" if missing else "nothing is missing"]
    )
