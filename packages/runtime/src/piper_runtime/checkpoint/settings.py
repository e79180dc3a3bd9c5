"""Hold a run's settings for checkpoints, and find the checkpoints of a folder."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from piper_ir.ground.errors import JobError, OutputError
from piper_ir.ground.keywords import checked_fields
from piper_runtime.checkpoint.sole_writer import sole_writer
from piper_runtime.weights.marker import MARKER

_STEP = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"step-\d{8,}\.partial")


@checked_fields(JobError)
@dataclass(frozen=True)
class Checkpoints:
    """Hold the folder and frequency of checkpoints; raise JobError for an unusable field.

    Attributes:
        folder: each checkpoint is a folder "step-00000100" in it; all ranks and the launcher must see it.
        every: save after every so many optimizer steps; the last step of a run is saved, too.
        keep: how many complete checkpoints stay; older ones are deleted. None keeps all.
        asynchronous: go on with the next step while files are written, as soon as the state is copied.
        snapshot: in a run that may be started again, copy the state to memory of this machine after every so many
            steps; after a failure the run goes on from it if the ranks that are left have all of it. None: no copies.
    """

    folder: str | Path
    every: int = 100
    keep: int | None = 3
    asynchronous: bool = True
    snapshot: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | Path) or not str(self.folder):
            raise JobError(f"Checkpoints(folder={self.folder!r}): the path of a folder is needed")
        for name, value, none in (
            ("every", self.every, ""), ("keep", self.keep, ", or None to keep all"),
            ("snapshot", self.snapshot, ", or None for no snapshots"),
        ):  # fmt: skip
            if none and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise JobError(
                    f"Checkpoints({name}={value!r}): an integer of at least 1 is needed{none}"
                )
        if not isinstance(self.asynchronous, bool):
            raise JobError(
                f"Checkpoints(asynchronous={self.asynchronous!r}): True or False is needed"
            )

    @property
    def path(self) -> Path:
        """Return the folder, absolute, since ranks may have other working directories."""
        return Path(self.folder).expanduser().absolute()

    def due(self, done: int) -> bool:
        """Return whether a checkpoint is made when so many steps are done."""
        return done % self.every == 0


def step_folder(step: int) -> str:
    """Return the name of the checkpoint after so many steps."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """Return the number of steps that the name of a checkpoint's folder says; None of another name."""
    matched = _STEP.fullmatch(folder.name)
    return None if matched is None else int(matched[1])


def partial_folder(step: int) -> str:
    """Return the name of the folder of a checkpoint that is not complete yet."""
    return f"{step_folder(step)}.partial"


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints of a folder by step, ascending; raise JobError when it cannot be read."""
    try:
        entries = (
            [(p, _STEP.fullmatch(p.name)) for p in folder.iterdir()] if folder.exists() else []
        )
        steps = {int(m[1]): p for p, m in entries if m is not None and (p / MARKER).is_file()}
    except OSError as e:
        raise JobError(
            f"the checkpoints in {folder} cannot be read: {e.strerror}; give another folder"
        ) from None
    return dict(sorted(steps.items()))


def newest_checkpoint(folder: Path) -> Path:
    """Return the newest complete checkpoint of a folder; raise JobError when there is none."""
    checkpoints = complete_checkpoints(folder)
    if checkpoints:
        return checkpoints[max(checkpoints)]
    names = (
        sorted(p.name for p in folder.iterdir() if p.name.startswith("step-"))
        if folder.is_dir()
        else []
    )
    what = f", only incomplete ones ({', '.join(names[:3])}), which a killed run has left" * bool(
        names
    )
    raise JobError(
        f"{folder} holds no complete checkpoint{what}; leave resume out to start from step 0"
    )


def chosen_checkpoint(resume: str | Path, checkpoint: Checkpoints | None) -> Path:
    """Return the folder of the checkpoint that a run resumes from; raise JobError when there is none."""
    if resume == "latest":
        if checkpoint is None:
            raise JobError(
                "resume='latest' needs the folder of the checkpoints: give "
                "checkpoint=Checkpoints(folder), or a path"
            )
        return newest_checkpoint(checkpoint.path)
    if not isinstance(resume, str | Path) or not str(resume):
        raise JobError(f"resume={resume!r}: 'latest' or the path of a checkpoint is needed")
    path = Path(resume).expanduser().absolute()
    if not path.is_dir():
        raise JobError(
            f"resume={str(resume)!r}: there is no such folder; give the path of a checkpoint, or 'latest'"
        )
    if not (path / MARKER).is_file() and (inside := complete_checkpoints(path)):
        raise JobError(
            f"resume={str(resume)!r} holds {len(inside)} checkpoints; give one of them, such as "
            f"{inside[max(inside)]}, or resume='latest' with this folder"
        )
    return path


def drop_partial(folder: Path) -> None:
    """Delete the checkpoints of a folder that are not complete and that nobody writes any more."""
    for path in [p for p in folder.iterdir() if _PARTIAL.fullmatch(p.name)]:
        shutil.rmtree(path)


def prepare_folder(checkpoint: Checkpoints, first_step: int, *, first: bool) -> None:
    """Make the folder ready for a run that begins with `first_step`; the `first` process of a run clears it up.

    Raises JobError for a folder with checkpoints of later steps, which this run would mix with its own, or into which
    another run writes, and OutputError for one that cannot be written.
    """
    folder = checkpoint.path
    later = [step for step in complete_checkpoints(folder) if step > first_step]
    if later:
        raise JobError(
            f"{folder} holds a checkpoint of step {max(later)}, and this run begins with step {first_step}: give a "
            f"folder of its own, or go on from there with resume='latest'"
        )
    if not first:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with sole_writer(folder):
            drop_partial(folder)  # a run that was killed while it saved may have left one
        trial = folder / ".writable"
        trial.write_bytes(b"")
        trial.unlink()
    except OSError as e:
        raise OutputError(
            f"checkpoints cannot be written to {folder}: {e.strerror}; choose another folder"
        ) from None
