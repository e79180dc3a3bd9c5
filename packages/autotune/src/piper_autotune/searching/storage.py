"""Open Optuna's storage, with one message when it cannot be used, and without Optuna's log lines and warnings."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import optuna
from optuna.samplers import BaseSampler

from piper_ir.ground.errors import PiperError, TuneError

WAITS_S = (0.1, 0.3, 1.0)
"""The seconds to wait before a database that another search makes at the same moment is opened again."""


@contextmanager
def quiet() -> Iterator[None]:
    """Switch Optuna's own lines and warnings off inside; warnings of the user's code are shown."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"optuna(\..*)?")
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        try:
            yield
        finally:
            optuna.logging.set_verbosity(level)


@contextmanager
def storage_errors(storage: object) -> Iterator[None]:
    """Raise TuneError for the errors of Optuna and its drivers that mean an unusable storage."""
    try:
        yield
    except optuna.exceptions.OptunaError as e:
        raise unusable(storage, e) from None


def open_study(
    storage: str | optuna.storages.BaseStorage | None, name: str, sampler: BaseSampler
) -> optuna.Study:
    """Open the study of this name, which is made when it does not exist.

    When two searches make the same database at once, it refuses the slower one; then it exists, and opens. Raises
    TuneError when the storage is locked, unreachable, or no storage.
    """
    for wait_s in (*WAITS_S, None):
        try:
            return optuna.create_study(
                study_name=name,
                storage=storage,
                sampler=sampler,
                direction="minimize",
                load_if_exists=True,
            )
        except PiperError:
            raise
        except Exception as e:  # Optuna hands on whatever the database's driver raises
            if wait_s is None or not _made_meanwhile(e):
                raise unusable(storage, e) from None
            time.sleep(wait_s)
    raise AssertionError("the last try returns or raises")


def _made_meanwhile(error: BaseException) -> bool:
    """Return whether another process made the tables, or the first rows, of the same database at the same time."""
    return any(
        sign in _root(error)
        for sign in ("already exists", "UNIQUE constraint", "duplicate key", "no such table")
    )


def _root(error: BaseException) -> str:
    """Return the first line of the driver's message."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error) or type(error).__name__).strip().splitlines()[0]


def unusable(storage: object, error: BaseException) -> TuneError:
    """Return the user's error for a storage that raised this."""
    text = _root(error)
    what = "is locked by another process" if "locked" in text else "cannot be used"
    if _made_meanwhile(error):
        what = "is being set up by another search at this moment; start this one again"
    return TuneError(
        f"the storage {storage} {what}: {text}; give an Optuna storage URL such as sqlite:///study.db, in a folder "
        f"that exists, or leave storage out to search in memory"
    )
