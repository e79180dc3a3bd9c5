"""Search over jobs: `job(trial)` chooses lengths, batches and sizes, before `strategy(trial)` chooses a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from piper_autotune import JobCase
from piper_compiler import Strategy
from piper_ir.ground.errors import JobError
from piper_ir.tools import user_code

if TYPE_CHECKING:
    from piper_runtime import Job


class KnownChoices:
    """Answer every suggestion with the value that is known for it, else with the first choice or the lowest number."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.params = dict(params)

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        return self.params.setdefault(name, next(iter(choices)))

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        number: int = self.params.setdefault(name, low)
        return number

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        number: float = self.params.setdefault(name, low)
        return number

    def skip(self, reason: str) -> NoReturn:
        raise JobError(f"the function skips its first choices: {reason}")


class _Recorded:
    """Wrap a trial, and notice the names that a job asks for."""

    def __init__(self, trial: Any) -> None:
        self._trial = trial
        self.params: dict[str, Any] = {}

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        return self._kept(name, self._trial.suggest_categorical(name, choices))

    def suggest_int(self, name: str, low: int, high: int, **more: Any) -> int:
        number: int = self._kept(name, self._trial.suggest_int(name, low, high, **more))
        return number

    def suggest_float(self, name: str, low: float, high: float, **more: Any) -> float:
        number: float = self._kept(name, self._trial.suggest_float(name, low, high, **more))
        return number

    def skip(self, reason: str) -> NoReturn:
        self._trial.skip(reason)
        raise AssertionError("a trial that skips goes on")

    def _kept(self, name: str, value: Any) -> Any:
        self.params[name] = value
        return value


class JobSpace:
    """Keep the jobs that a function of a trial has made, each once by the values of its own parameters.

    Args:
        function: `job(trial)`.
        case_of: Makes the problem of a job.
    """

    def __init__(self, function: Callable[[Any], Job], case_of: Callable[[Job], JobCase]) -> None:
        self._function, self._make = function, case_of
        self._jobs: dict[tuple[tuple[str, Any], ...], Job] = {}
        self._cases: dict[int, JobCase] = {}

    def job(self, trial: Any) -> Job:
        """Return the job of a trial, the same object for the same values; raise JobError if there is none."""
        from piper_runtime import Job

        recorded = _Recorded(trial)
        with user_code("job(trial)", JobError):
            returned: object = self._function(recorded)
        if not isinstance(returned, Job):
            raise JobError(
                f"job(trial) returned a {type(returned).__name__}; a piper.Job is needed"
            )
        return self._jobs.setdefault(tuple(sorted(recorded.params.items())), returned)

    def first(self) -> JobCase:
        """Return the case of the first choices."""
        return self.case(self.job(KnownChoices({})))

    def case(self, job: Job) -> JobCase:
        """Return the problem of a job, made once."""
        if id(job) not in self._cases:
            self._cases[id(job)] = self._make(job)
        return self._cases[id(job)]

    def job_of(self, params: Mapping[str, Any]) -> Job:
        """Return the job that the params of a strategy have chosen."""
        return self.job(KnownChoices(params))

    def case_of(self, params: Mapping[str, Any]) -> JobCase:
        """Return the problem of that job."""
        return self.case(self.job_of(params))

    def with_job(self, strategy: Callable[[Any], Strategy]) -> Callable[[Any], Strategy]:
        """Return a function of a trial that chooses the job, then the strategy; the job is captured by then."""

        def chosen(trial: Any) -> Strategy:
            self.case(self.job(trial))
            return strategy(trial)

        return chosen
