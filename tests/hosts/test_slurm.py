"""The file that `piper launch` prints for Slurm, on a Slurm of one node: done, cancelled, and queued again.

Slurm's daemons run in a network namespace of their own, with all their files in the test's folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.command_line import command
from tests.helpers.hosts import ADDRESSES, Hosts, some_hosts, why_not
from tests.hosts.jobs import assert_trained, await_files, recipe

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")
MISSING = [
    name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None
]
WHY_NOT = why_not() or (
    f"no {', '.join(MISSING)} (Debian: apt-get install slurmctld slurmd slurm-client munge)"
    if MISSING
    else ""
)
pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

CONFIG = """\
ClusterName=one
SlurmctldHost=a({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ReturnToService=2
KillWait=5
NodeName=a NodeAddr={address} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
UP_S, DONE_S = 120.0, 400.0
"""The most seconds until the node is up, and until a job has ended."""


@dataclass
class Slurm:
    """A Slurm of one node on a machine, with the folder of its files."""

    hosts: Hosts
    folder: Path
    daemons: frozenset[int] = frozenset()

    def __call__(self, *words: object) -> str:
        """Run one of Slurm's programs, and return its output."""
        settings = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        process = self.hosts.start("a", [str(word) for word in words], settings)
        text: str = process.communicate(timeout=60)[0]
        assert process.returncode == 0, text
        return text

    def submit(self, path: Path, *options: object) -> tuple[str, Path]:
        """Submit the file that `piper launch` prints for a recipe; return the number and the output of the job."""
        words = ["--out", path.parent / "runs", "--nodes", 1, *options, "--json"]
        printed = json.loads(command("launch", path, *words).stdout)["slurm"]
        file, output = path.with_suffix(".sh"), path.with_suffix(".out")
        file.write_text(printed + "\n")
        number = self("sbatch", "--parsable", "--chdir", path.parent, "--output", output, file)
        return number.strip(), output

    def await_end(self, number: str, output: Path) -> str:
        """Return the output of a job when it has left the queue, and all its processes have."""
        end = time.monotonic() + DONE_S
        while self("squeue", "--noheader", "--jobs", number).strip():
            assert time.monotonic() < end, output.read_text()
            time.sleep(0.5)
        while left := set(self.hosts.running("a")) - self.daemons:
            assert time.monotonic() < end, left
            time.sleep(0.5)
        return output.read_text()


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    folder = tmp_path / "slurm"
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    cpus = os.cpu_count() or 1
    values = {"address": ADDRESSES["a"], "folder": folder, "cpus": cpus}
    (folder / "slurm.conf").write_text(CONFIG.format(**values))
    # A namespace has no control groups; the plugin that looks for them only when they are used starts without.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    names = ("socket", "pid", "log", "seed")
    flags = {"log": "log-file", "pid": "pid-file", "seed": "seed-file"}
    munge = [f"--{flags.get(name, name)}={folder}/munge.{name}" for name in names]
    settings = {"SLURM_CONF": str(folder / "slurm.conf")}
    with some_hosts("a") as hosts:
        programs = [
            ["munged", "--foreground", "--force", f"--key-file={key}", *munge],
            ["slurmctld", "-D"],
            ["slurmd", "-D", "-N", "a"],
        ]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        for program in programs:
            hosts.start("a", program, settings, **quiet)
            time.sleep(2)
        made = Slurm(hosts, folder)
        end = time.monotonic() + UP_S
        while "idle" not in made("sinfo", "--noheader", "--format", "%T"):
            assert time.monotonic() < end, (folder / "slurmctld.log").read_text()
            time.sleep(0.5)
        made.daemons = frozenset(hosts.running("a"))
        yield made


def test_a_job_trains_what_one_device_trains(slurm: Slurm, tmp_path: Path) -> None:
    path = recipe(tmp_path)
    text = slurm.await_end(*slurm.submit(path))
    assert (tmp_path / "runs" / "recipe-001" / "measured.json").exists(), text
    assert_trained(path, tmp_path / "runs" / "recipe-001")


def test_a_job_that_is_cancelled_ends_and_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    path = recipe(tmp_path, 0.05, steps=100_000)
    number, output = slurm.submit(path)
    await_files(*(tmp_path / f"at-{rank}" for rank in range(2)))
    slurm("scancel", number)
    text = slurm.await_end(number, output)
    assert "CANCELLED" in text and "SIGABRT" not in text, text


def test_a_job_that_is_queued_again_goes_on_from_its_checkpoint(
    slurm: Slurm, tmp_path: Path
) -> None:
    path, saved = recipe(tmp_path, 1.0, slow_from=4), tmp_path / "saved"
    number, output = slurm.submit(path, "--checkpoint", saved, "--every", 2)
    await_files(tmp_path / "at-0", saved / "step-00000004" / "complete.json")
    slurm("scontrol", "requeue", number)
    slurm("scontrol", "update", f"JobId={number}", "StartTime=now")
    text = slurm.await_end(number, output)
    runs = sorted((tmp_path / "runs").iterdir())
    losses = json.loads((runs[-1] / "measured.json").read_text())["losses"]
    assert len(losses) == 2, (text, losses)
    assert_trained(path, runs[-1], first=4)
