"""Define one class per kind of mistake; each is also a builtin, so that callers who know only builtins still catch it.

A message names the problem, its place, the accepted values, and a way out.
"""

from __future__ import annotations


class PiperError(Exception):
    """Stand for every error that Piper raises on purpose; the command line turns it into exit code 2.

    `told_by_another` is True if another process of the same run says it in full, so that this one need not. `line` is
    the place in a user's file where it was raised, whose words are Python's; "" for other errors.
    """

    told_by_another: bool = False
    line: str = ""


class CaptureError(PiperError, ValueError):
    """The model cannot be captured: a graph break, an op that cannot be functionalised, a chunk not affine in rows."""


class SelectorError(PiperError, LookupError):
    """A selection matches nothing, or names a coordinate or value that does not exist."""


class DirectiveError(PiperError, ValueError):
    """A directive's legality condition does not hold on the graph to which it was applied.

    `chunks` are the ids of the chunks that the error is about, if it names some.
    """

    def __init__(self, message: str, chunks: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.chunks = chunks


class CompileError(PiperError, ValueError):
    """The directives together do not describe a training step that can run (something unplaced, a cyclic order...).

    `chunks` are the ids of the chunks that the error is about, if it names some.
    """

    def __init__(self, message: str, chunks: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.chunks = chunks


class PlanError(PiperError, ValueError):
    """A plan breaks a rule of `piper_ir.verify`."""


class FormatError(PiperError, ValueError):
    """A file or text does not parse: unknown key, wrong type, unknown version, truncated."""


class ClusterError(PiperError, ValueError):
    """A cluster name or description is not known."""


class CostModelError(PiperError, ValueError):
    """A cost model of the user's cannot be made, or gives something else than a duration."""


class JobError(PiperError, ValueError):
    """A job is not usable: the batch does not divide, a callable has the wrong shape, an optimizer is unknown."""


class TuneError(PiperError, ValueError):
    """A search cannot start, or found no plan that can be used: its arguments, space, storage, or memory limit."""


class ExecutionError(PiperError, RuntimeError):
    """A run failed; the message names rank, instruction and peer."""


class RankError(ExecutionError):
    """A rank died, raised, or lost its peer; `lost` are the ranks whose process died."""

    def __init__(self, message: str, lost: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.lost = lost


class HangError(ExecutionError, TimeoutError):
    """No rank made progress for too long; `report` shows every rank's last instructions in several lines."""

    def __init__(self, message: str, report: str = "") -> None:
        super().__init__(message)
        self.report = report


class NonFiniteLossError(ExecutionError, ArithmeticError):
    """A loss is NaN or infinite; the message names step, rank and microbatch."""


class OutputError(PiperError, OSError):
    """A file or folder cannot be written."""


class PiperWarning(RuntimeWarning):
    """Tell a user something about work that goes on or was done."""


class MissingPackageError(PiperError, ImportError):
    """An optional package that was asked for is not installed; the message names the package to install."""
