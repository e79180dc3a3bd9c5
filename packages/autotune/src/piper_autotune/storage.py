"""Optuna underneath: its storage, with one message when that cannot be used, and without its log lines and warnings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import optuna
from optuna.samplers import BaseSampler

from piper_ir.errors import PiperError, TuneError


@contextmanager
def quiet() -> Iterator[None]:
    """Optuna's own lines and warnings are off inside; what the user's code warns of is shown."""
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
    """TuneError for what Optuna and the drivers below it raise when a storage is not usable."""
    try:
        yield
    except optuna.exceptions.OptunaError as e:
        raise unusable(storage, e) from None


def open_study(storage: str | optuna.storages.BaseStorage | None, name: str, sampler: BaseSampler) -> optuna.Study:
    """The study of this name, made when it is not there. TuneError: the storage is locked, unreachable or not one."""
    try:
        return optuna.create_study(study_name=name, storage=storage, sampler=sampler, direction="minimize", load_if_exists=True)
    except PiperError:
        raise
    except Exception as e:  # Optuna hands on whatever the database's driver raises
        raise unusable(storage, e) from None


def unusable(storage: object, error: BaseException) -> TuneError:
    """What to tell the user of a storage that raised this."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = (str(cause) or type(cause).__name__).strip().splitlines()[0]
    what = "is locked by another process" if "locked" in text else "cannot be used"
    return TuneError(
        f"the storage {storage} {what}: {text}; give an Optuna storage URL such as sqlite:///study.db, in a folder that exists, "
        "or leave storage out to search in memory"
    )
