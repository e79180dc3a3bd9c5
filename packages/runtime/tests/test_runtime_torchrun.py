"""The same file under plain python and under torchrun, and the command lines that start it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from packages.runtime.tests.chains import chain, run
from packages.runtime.tests.handmade import adamw
from piper_ir.ground.errors import ExecutionError, HangError, JobError, RankError
from piper_runtime.checkpoint.settings import complete_checkpoints
from piper_runtime.launch.ground.protocol import Failure
from piper_runtime.launch.torchrun import torchrun
from piper_runtime.launch.torchrun.command_lines import Launch, launch_sections, launch_text
from piper_runtime.launch.worker.mail import Mail, Patient
from piper_runtime.transport.gloo import GlooCommunicators

FILE = """
import atexit, dataclasses, json, os, sys
sys.path[:0] = {path!r}
def threads():  # called last: native ones that are left when the interpreter is taken down
    with open(name + ".threads", "w") as file:
        file.write(str(len(os.listdir("/proc/self/task"))))
atexit.register(threads)
from packages.runtime.tests.chains import chain, run
plan, job = chain(pp=2, clip_norm=0.01)
steps = []
for _ in range(2 if "RANK" in os.environ else 1):  # a second run goes on with the processes of torchrun
    found = run(plan, job, launcher="processes", timeout_s=30, on_step=lambda s: steps.append(s.step))
states = {{n: t.double().sum().item() for n, t in found.state_dict().items()}}
name = os.path.join({out!r}, os.environ.get("RANK", "plain"))
with open(name, "w") as file:
    json.dump([found.losses, found.step_s, states, steps, len(found.rank_gradients)], file)
"""


def start(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a file, with options of torchrun under torchrun."""
    way = ["-m", "torch.distributed.run", *options] if options else []
    return subprocess.run(
        [sys.executable, *way, str(file)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=file.parent,
    )


@pytest.mark.long
def test_the_same_file_under_python_and_under_torchrun(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(FILE.format(path=sys.path, out=str(tmp_path)))
    for options in ((), ("--standalone", "--nproc-per-node", "2")):
        done = start(file, *options)
        assert done.returncode == 0, done.stderr
    plain, zero, one = (json.loads((tmp_path / name).read_text()) for name in ("plain", "0", "1"))
    assert plain[0] == zero[0] == one[0] and plain[2] == zero[2] == one[2]
    assert zero[1] == one[1], "one Run for all"
    assert 2 * plain[3] == zero[3] == [0, 1, 2, 0, 1, 2] and one[3] == []
    assert plain[4] == 2
    # One of gloo's that then lets go of a tensor would end the process with SIGABRT (`torchrun._leave`). CUDA keeps its
    # own.
    if not torch.cuda.is_available():
        assert [(tmp_path / f"{rank}.threads").read_text() for rank in "01"] == ["1", "1"]


SAVING = """
import json, os, sys
sys.path[:0] = {path!r}
from packages.runtime.tests.chains import chain, run
from packages.runtime.tests.handmade import adamw
from piper_runtime import Checkpoints
plan, job = chain(pp=2, optimizer=adamw)
options = dict(launcher="processes", timeout_s=30, checkpoint=Checkpoints({out!r} + "/checkpoints", every=2))
found = run(plan, job, steps=3, **options)
found = run(plan, job, steps=2, resume="latest", **options)
states = {{n: t.tolist() for n, t in found.state_dict().items()}}
with open(os.path.join({out!r}, os.environ["RANK"]), "w") as file:
    json.dump([found.losses, found.first_step, states], file)
"""


@pytest.mark.long
def test_ranks_of_torchrun_save_and_resume(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SAVING.format(path=sys.path, out=str(tmp_path)))
    done = start(file, "--standalone", "--nproc-per-node", "2")
    assert done.returncode == 0, done.stderr
    plan, job = chain(pp=2, optimizer=adamw)
    whole = run(plan, job, steps=5)
    wanted = [whole.losses[3:], 3, {n: t.tolist() for n, t in whole.state_dict().items()}]
    assert [json.loads((tmp_path / rank).read_text()) for rank in "01"] == [wanted, wanted]
    assert list(complete_checkpoints(tmp_path / "checkpoints")) == [3, 4, 5]


FAILING = """
import os, sys, time
sys.path[:0] = {path!r}
from packages.runtime.tests.chains import chain, run
from packages.runtime.tests.handmade import batch
def failing(step, rows):
    if step == 1 and rows.start == 2:
        {action}
    return batch(step, rows)
plan, job = chain(pp=2, batch=failing)
try:
    run(plan, job, launcher="processes", timeout_s=2)
except Exception as e:
    print(f"<{{os.environ['RANK']}} {{type(e).__name__}}: {{e}}>", flush=True)
    raise SystemExit(3)
"""


@pytest.mark.long
@pytest.mark.parametrize("action", ["raise ValueError('bad')", "sys.exit(7)"])
def test_a_failure_is_one_error_and_ends_torchrun(tmp_path: Path, action: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(FAILING.format(path=sys.path, action=action))
    done = start(file, "--standalone", "--nproc-per-node", "2")
    assert done.returncode != 0 and "SIGABRT" not in done.stderr, done.stderr
    said = r"<0 RankError: rank 0, step 1.* (ValueError: bad|SystemExit: 7 )"
    assert re.search(said, done.stdout), done.stdout + done.stderr


@pytest.mark.long  # test_runtime_processes.py has them in `make test`
@pytest.mark.parametrize(
    ("action", "says"),
    [
        (
            "raise SystemExit(0)",
            r"RankError: rank 0, step 1: SystemExit: 0 was raised in the job's code .*train.py:\d+",
        ),
        (
            "time.sleep(1000)",
            r"HangError: no rank made progress for 2 s .*rank 0 ran instruction .*rank 1 ",
        ),
    ],
)
def test_a_failure_is_one_error_on_every_rank(tmp_path: Path, action: str, says: str) -> None:
    """Without torchrun, which ends the other ranks at once: anybody may start ranks with its variables."""
    file = tmp_path / "train.py"
    file.write_text(FAILING.format(path=sys.path, action=action))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    same = os.environ | {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(file)], env=same | {"RANK": rank, "LOCAL_RANK": rank}, **pipes
        )
        for rank in "01"
    ]
    for rank, process in enumerate(ranks):
        said = process.communicate(timeout=200)[0]
        assert process.returncode and re.search(f"<{rank} {says}", said), said


@pytest.fixture
def ranked(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of rank 0 of two, as somebody other than torchrun may have set it."""
    monkeypatch.setattr(torchrun, "_member", None)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.usefixtures("ranked")
def test_another_number_of_processes_than_ranks() -> None:
    plan, job = chain(pp=2, dp=2)
    with pytest.raises(
        ExecutionError,
        match=r"4 ranks, but 2 processes were started \(WORLD_SIZE\); use --nproc-per-node 4",
    ):
        run(plan, job, launcher="processes")


def test_a_port_that_is_in_use(ranked: pytest.MonkeyPatch) -> None:
    plan, job = chain(pp=2)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ranked.setenv("MASTER_PORT", port)
        with pytest.raises(
            ExecutionError,
            match=rf"cannot meet at 127\.0\.0\.1:{port} .*in use: choose another with "
            rf"--master-port",
        ):
            run(plan, job, launcher="processes")


def test_an_environment_that_makes_no_sense(ranked: pytest.MonkeyPatch) -> None:
    assert torchrun.is_first()
    ranked.setenv("RANK", "first")
    with pytest.raises(ExecutionError, match="RANK='first'; a number is needed"):
        torchrun.is_first()


def test_clocks_of_ranks_are_compared_by_round_trips() -> None:
    store, found = dist.HashStore(), {}

    def rank(r: int) -> None:
        group = GlooCommunicators(store, r).group("everyone", [0, 1, 2])
        found[r] = torchrun.clock_ahead(group, r, 3)

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[0] == (0.0, 0.0) and len(found) == 3
    assert all(abs(ahead) <= error > 0 for r, (ahead, error) in found.items() if r), (
        "they all have one clock"
    )


LINES = """\
# torchrun, one machine
torchrun --standalone --nproc-per-node 8 -m piper run 'my train.py' -p m=4 --launcher processes

# torchrun, 2 machines, the same line on each
torchrun --nnodes 2 --rdzv-id piper --rdzv-backend c10d --rdzv-endpoint HEAD:29500 --nproc-per-node 4 -m piper run 'my train.py' \
-p m=4 --launcher processes

# Slurm, 2 nodes: a file for `sbatch`
#!/bin/bash
#SBATCH --job-name piper
#SBATCH --nodes 2
#SBATCH --ntasks-per-node 1
#SBATCH --cpus-per-task 4
#SBATCH --gpus-per-node 4
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes 2 --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:29500" --nproc-per-node 4 -m piper \
run 'my train.py' -p m=4 --launcher processes

# Ray, 2 machines
ray start --head --port 6379 --num-cpus 4 --num-gpus 4 --include-dashboard false --disable-usage-stats  # on HEAD
ray start --address HEAD:6379 --num-cpus 4 --num-gpus 4  # on each other machine
RAY_ADDRESS=HEAD:6379 piper run 'my train.py' -p m=4 --launcher ray  # on HEAD
ray stop  # on each machine, afterwards
"""


def test_launch_lines() -> None:
    assert (
        launch_text(
            launch_sections(Launch("my train.py", 8, nodes=2, gpus=True, arguments=["-p", "m=4"]))
        )
        == LINES
    )
    kept = launch_sections(Launch("f.py", 2, nodes=1, arguments=["--checkpoint", "a b"]))["slurm"]
    assert "#SBATCH --requeue" in kept.lines and kept.lines.endswith("processes $resume")
    assert "ls 'a b'/step-*/complete.json" in kept.lines
    odd = launch_text(launch_sections(Launch("f.py", 3)))
    assert "# Ray, 1 machine\n" in odd and "--address" not in odd and "gpus" not in odd
    with pytest.raises(JobError, match="8 ranks do not divide over 3 nodes"):
        launch_sections(Launch("f.py", 8, nodes=3))


def test_the_lines_are_lines_of_a_shell_and_torchrun_knows_its_options() -> None:
    from torch.distributed.run import get_args_parser

    known = get_args_parser()
    lines = [
        line
        for line in launch_text(launch_sections(Launch("f.py", 4))).splitlines()
        if "torchrun" in line and not line.startswith("#")
    ]
    for line in lines:
        words = shlex.split(line)
        options = known.parse_args(words[words.index("torchrun") + 1 :])
        assert (
            options.module
            and options.training_script == "piper"
            and options.training_script_args[:2] == ["run", "f.py"]
        )
    assert len(lines) == 3 and os.environ.get("RANK") is None


STORE = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def served() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process with a store, and its port."""
    with subprocess.Popen(
        [sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


def test_a_store_that_stops_or_ends_is_given_up(served: tuple[subprocess.Popen[str], int]) -> None:
    process, port = served
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
    mail = Mail(store, 0, Patient("piper store"), "the store at HOST", patience_s=0.5)
    mail.put("plan", b"x")
    assert mail.get("plan") == b"x" and mail.tell(1, [], b"") == (None, None)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # until then it may answer
    with pytest.raises(
        HangError,
        match=r"^the store at HOST does not answer: that machine has ended.*\(waited 0\.5 s\)$",
    ):
        mail.get("plan")
    mail.last_word(b"", [1])
    process.kill()
    with pytest.raises(
        ExecutionError, match=r"^the store at HOST has closed the connection: the process there"
    ):
        Mail(store, 0, Patient("piper store"), "the store at HOST", patience_s=30.0).get("plan")


@pytest.mark.long
def test_one_rank_says_what_all_have_to_say(
    ranked: pytest.MonkeyPatch, served: tuple[subprocess.Popen[str], int]
) -> None:
    process, port = served
    ranked.setenv("MASTER_PORT", str(port))
    assert torchrun.is_first_to_say("without the store of torchrun") and torchrun.is_first_to_say(
        "without the store of torchrun"
    )
    ranked.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    said = [torchrun.is_first_to_say(text) for text in ("no such file", "no such file", "another")]
    assert said == [True, False, True]
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    ranked.setattr(torchrun, "LAST_WORDS_S", 0.3)
    assert torchrun.is_first_to_say("no such file"), "nobody is left to ask"


def test_other_ranks_repeat_the_beginning_of_rank_zeros_error() -> None:
    short = torchrun._ended_by_first(
        Failure("HangError", "no rank made progress", ""), ["a (10.0.0.1)", "b (10.0.0.2)"]
    )
    long = torchrun._ended_by_first(
        Failure("RankError", "rank 3 " * 100, ""), ["a (10.0.0.1)", "b (10.0.0.2)"]
    )
    assert (
        type(short) is HangError and str(short) == "no rank made progress" and short.told_by_another
    )
    assert (
        type(long) is RankError
        and str(long).endswith(" ... (rank 0 on node a (10.0.0.1) says the rest)")
        and len(str(long)) < 300
    )
