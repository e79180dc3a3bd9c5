"""Write the command lines that start a file's ranks on one machine or on many."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from piper_ir.ground.errors import JobError

PORT, RAY_PORT = 29500, 6379


@dataclass(frozen=True, slots=True)
class Section:
    """Hold the `lines` of a shell or a file as one text, with a `title`."""

    title: str
    lines: str


@dataclass(frozen=True)
class Launch:
    """Describe a run of a file that command lines start.

    Attributes:
        file: the file.
        world: the number of its ranks.
        nodes: the number of machines; None: 2 if the ranks divide over them, else 1.
        gpus: whether to ask for a GPU for each rank.
        arguments: more arguments of `piper run`.
        of_ray: further ones that only Ray takes.
        of_torchrun: arguments of torchrun itself.
    """

    file: str | Path
    world: int
    nodes: int | None = None
    gpus: bool = False
    arguments: Sequence[str] = ()
    of_ray: Sequence[str] = ()
    of_torchrun: Sequence[str] = ()


def launch_sections(launch: Launch) -> dict[str, Section]:
    """Return the commands to run a file's ranks with torchrun, Slurm and Ray.

    Torchrun on one machine is "torchrun"; on several machines there are "torchrun-nodes", "slurm" and "ray". HEAD
    stands for the first machine's name. Raises JobError when the ranks do not divide over the nodes.
    """
    world, gpus = launch.world, launch.gpus
    nodes = launch.nodes or (2 if world % 2 == 0 else 1)
    if world % nodes:
        raise JobError(
            f"{world} ranks do not divide over {nodes} nodes; give a number of nodes that divides {world}"
        )
    each = world // nodes
    words = ["run", str(launch.file), *launch.arguments]
    text = shlex.join(words)
    own = "".join(f"{shlex.quote(word)} " for word in launch.of_torchrun)
    ranks = f"{own}--nproc-per-node {each} -m piper {text} --launcher processes"
    alone = (
        f"torchrun --standalone {own}--nproc-per-node {world} -m piper {text} --launcher processes"
    )
    meet = f"torchrun --nnodes {nodes} --rdzv-id piper --rdzv-backend c10d --rdzv-endpoint HEAD:{PORT} {ranks}"
    return {
        "torchrun": Section("torchrun, one machine", alone),
        "torchrun-nodes": Section(
            f"torchrun, {_count(nodes, 'machine')}, the same line on each", meet
        ),
        "slurm": Section(
            f"Slurm, {_count(nodes, 'node')}: a file for `sbatch`",
            _slurm(nodes, each, gpus, ranks, _checkpoint_to_find(launch.arguments)),
        ),
        "ray": Section(
            f"Ray, {_count(nodes, 'machine')}",
            _ray(nodes, each, gpus, shlex.join([*words, *launch.of_ray])),
        ),
    }


def launch_text(sections: Mapping[str, Section]) -> str:
    """Return all sections below each other, each with its title."""
    return "\n\n".join(f"# {s.title}\n{s.lines}" for s in sections.values()) + "\n"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n > 1)}"


def _checkpoint_to_find(arguments: Sequence[str]) -> str:
    """Return the folder of checkpoints of a run that does not look for one by itself; "" if there is none."""
    if "--checkpoint" not in arguments or "--resume" in arguments:
        return ""
    return arguments[arguments.index("--checkpoint") + 1]


def _slurm(nodes: int, each: int, gpus: bool, ranks: str, saved: str) -> str:
    """Return the file for sbatch; a job that is queued again goes on from its newest checkpoint in `saved`."""
    complete = f"{shlex.quote(saved)}/step-*/complete.json"
    lines = [
        "#!/bin/bash",
        "#SBATCH --job-name piper",
        f"#SBATCH --nodes {nodes}",
        "#SBATCH --ntasks-per-node 1",
        f"#SBATCH --cpus-per-task {each}",
        *([f"#SBATCH --gpus-per-node {each}"] if gpus else []),
        *(["#SBATCH --requeue", "#SBATCH --open-mode append"] if saved else []),
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        *(
            [f'[ -n "$SLURM_RESTART_COUNT" ] && ls {complete} >/dev/null 2>&1 && resume=--resume']
            if saved
            else []
        ),
        f'srun torchrun --nnodes {nodes} --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d '
        f'--rdzv-endpoint "$head:{PORT}" '
        f"{ranks}{' $resume' if saved else ''}",
    ]
    return "\n".join(lines)


def _ray(nodes: int, each: int, gpus: bool, text: str) -> str:
    room = f"--num-cpus {each}" + (f" --num-gpus {each}" if gpus else "")
    quiet = "--include-dashboard false --disable-usage-stats"
    lines = [f"ray start --head --port {RAY_PORT} {room} {quiet}  # on HEAD"]
    if nodes > 1:
        lines.append(f"ray start --address HEAD:{RAY_PORT} {room}  # on each other machine")
    lines.append(f"RAY_ADDRESS=HEAD:{RAY_PORT} piper {text} --launcher ray  # on HEAD")
    lines.append("ray stop  # on each machine, afterwards")
    return "\n".join(lines)
