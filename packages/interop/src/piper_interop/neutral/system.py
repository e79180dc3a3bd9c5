"""Define the face of a system's folder: a reader, a table of options, the description of a job, and an export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from piper_interop.neutral.described import JobDescription, ModelSizes
from piper_interop.neutral.foreign import Foreign
from piper_interop.neutral.options import Judgement, OptionTable, judge
from piper_ir.ground.errors import JobError


@dataclass(frozen=True)
class Asked:
    """Hold the answers of a user beside the file of another system.

    Attributes:
        devices: of the job; None if the file says it.
        sets: further options as the system's own command line writes them, such as "--training.seq_len=4096".
        python: the interpreter that has the system installed; "" for the one that runs.
        sizes: of the model, for systems whose files have none of it.
        length: tokens of a row, for systems whose files do not say it.
        rows: rows of a step, likewise.
        stand_ins: the names given with `--as`.
        skip_unknown: whether options that no row names are passed over.
    """

    devices: int | None = None
    sets: tuple[str, ...] = ()
    python: str = ""
    sizes: ModelSizes | None = None
    length: int | None = None
    rows: int | None = None
    stand_ins: frozenset[str] = frozenset()
    skip_unknown: bool = False


@dataclass(frozen=True)
class Exported:
    """Hold a job in the form of another system.

    Attributes:
        files: texts by the names of the files; the first one is the one to start with.
        notes: the parts of the strategy that the system says in the nearest form.
    """

    files: dict[str, str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class System:
    """Hold one system.

    Attributes:
        name: such as "megatron".
        read: return the job's options as the system resolves them; raise JobError for a file that is none of its own.
        table: the rows of its options.
        describe: return the job that judged options describe; raise JobError for options that do not go together.
        stand_ins: the names that `--as` accepts, with the words about each.
        complete: whether its files say the model, the tokens of a row and the rows of a step.
        export: return the system's files for a described job; raise JobError that names all that the system cannot do,
            with the nearest that it can. None if its files are not written yet.
    """

    name: str
    read: Callable[[str, Asked], Foreign]
    table: OptionTable
    describe: Callable[[Foreign, Asked], JobDescription]
    stand_ins: dict[str, str]
    complete: bool = False
    export: Callable[[JobDescription], Exported] | None = None

    def check_asked(self, asked: Asked) -> None:
        """Raise JobError for answers that the system's file has itself, which would be passed over."""
        decided = {
            "--model": asked.sizes,
            "--length": asked.length,
            "--global-batch": asked.rows,
        }
        given = [flag for flag, value in decided.items() if value is not None]
        if self.complete and given:
            raise JobError(
                f"{', '.join(given)}: a job of {self.name} says its model, the tokens of a row and the rows of a step; "
                f"change them by --set, with the options of {self.name}"
            )

    def described(self, foreign: Foreign, asked: Asked) -> tuple[Judgement, JobDescription]:
        """Return the verdicts on a job's options, and the job that they describe.

        Raises JobError for options that are unknown or cannot be said here, and for options that do not go together.
        """
        judgement = judge(foreign, self.table, asked.stand_ins, asked.skip_unknown)
        return judgement, self.describe(foreign, asked)


@dataclass(frozen=True)
class Imported:
    """Hold an imported job: as the system says it, the verdicts on its options, and the description."""

    foreign: Foreign
    judgement: Judgement
    described: JobDescription
