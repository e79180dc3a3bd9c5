"""Load the user's FILE.py, which is run.

It must define `job` and `strategy`. It may define `steps`, and `params`: values for a strategy that is a function of a
trial, if nobody searches. torch is imported when a file is run, so that commands without one start at once.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from piper.api.problems.fixed_trial import FirstChoices, FixedTrial
from piper_compiler import Options, Strategy, kernel_source, load_strategy
from piper_ir.ground.errors import JobError, PiperError, PiperWarning
from piper_ir.tools import unread, user_code

if TYPE_CHECKING:
    from piper_runtime import Job


@dataclass(frozen=True)
class JobFile:
    """Hold the definitions of a FILE.py.

    Attributes:
        job: The job to train.
        strategy: The strategy to train it with.
        steps: The default number of steps; 3 without one in the file.
        function: The file's strategy if it is a function of a trial, else None.
        params: The answers to the function's suggestions, given or by default.
        options: How its plans are compiled: the file's `options`, or as the strategy's variant says.
        own_job: The file's job where the strategy's variant has another precision; None where it has not.
    """

    path: Path
    job: Job
    strategy: Strategy
    steps: int
    function: Callable[[Any], Any] | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    options: Options = field(default_factory=Options)
    own_job: Job | None = None

    def asked_options(self, kernels: str | None, cuda_graph: bool = False) -> Options:
        """Return the options of a command, where its own come before the file's."""
        return replace(
            self.options,
            kernels=self.options.kernels if kernels is None else kernel_source(kernels),
            cuda_graph=cuda_graph or self.options.cuda_graph,
        )

    def with_strategy(self, strategy: Strategy) -> JobFile:
        """Return the file with another strategy, whose params may say the precision of the job and the options."""
        from piper.api.problems.variants import PlanVariant, said_by

        if not said_by(strategy.params):
            return replace(self, strategy=strategy)
        variant, own = PlanVariant.of(strategy.params), self.own_job or self.job
        job, options = variant.job(own), variant.options
        return replace(self, strategy=strategy, job=job, options=options, own_job=own)

    def varied(
        self, params: Mapping[str, str], *, any_value: bool = False, flag: str = "-p"
    ) -> Strategy:
        """Return the strategy with other values of some parameters.

        Raises JobError when it is not a function of a trial, or has no such parameter.

        Args:
            params: The other values.
            any_value: Accept integers that the function does not offer.
            flag: The name of the command line's option in messages.
        """
        if self.function is None:
            raise JobError(
                f"{self.path}: `strategy` is not a function of a trial, so that it has no parameters to change"
            )
        trial = FixedTrial({**self.params, **params}, params if any_value else (), flag)
        return _answered(self.path, self.function, trial, params)


@dataclass(frozen=True)
class SearchFile:
    """Hold a FILE.py to search: `strategy` is a function of a trial, or None, and `job` may be one."""

    path: Path
    job: Job | Callable[[Any], Job]
    strategy: Callable[[Any], Strategy] | None
    steps: int


def load_space(path: str | Path) -> SearchFile:
    """Run FILE.py and take its `job` and its `strategy`; raise JobError if that is no function of a trial.

    A file with a job alone is searched over `piper.space`.
    """
    path = Path(path)
    module = _run(path)
    strategy = getattr(module, "strategy", None)
    job = getattr(module, "job", None)
    if not callable(strategy) and (strategy is not None or callable(job)):
        actual = (
            "no `strategy`"
            if strategy is None
            else f"a `strategy` that is a {type(strategy).__name__}"
        )
        raise JobError(
            f"{path} defines {actual}; to search, define `def strategy(trial)` that calls "
            f"trial.suggest_categorical, suggest_int or suggest_float and returns a piper.Strategy"
        )
    return SearchFile(
        path, job if callable(job) else _job(path, module), strategy, _steps(path, module)
    )


def load_job(path: str | Path) -> tuple[Job, Strategy | None, Options]:
    """Run FILE.py and take its `job`, the strategy that it would run with, if it says one, and its options.

    Raises JobError for a missing or broken file, or one without a job.
    """
    path = Path(path)
    module = _run(path)
    job, strategy = _job(path, module), getattr(module, "strategy", None)
    function, params = _function(module), _params(path, module)
    if function is not None and not params:
        text = f"{path}: strategy(trial) has no `params`, so that there is no row of its own"
        warnings.warn(text, PiperWarning, stacklevel=2)
        return job, None, _options(path, module)
    if function is not None:
        return job, _answered(path, function, FixedTrial(params), ()), _options(path, module)
    return job, None if strategy is None else _checked(path, strategy), _options(path, module)


def load_file(
    path: str | Path, params: Mapping[str, str] | None = None, strategy: str | Path | None = None
) -> JobFile:
    """Run FILE.py and take its `job` and `strategy`.

    Raises JobError for a missing or broken file, or one that lacks a name.

    Args:
        path: The file.
        params: Answers to the suggestions of a strategy that is a function of a trial; they come before the file's own
            `params`.
        strategy: A JSON file whose strategy is used instead of the file's own.
    """
    path = Path(path)
    module = _run(path)
    if strategy is not None and params:
        raise JobError(
            "-p gives parameters to the file's strategy, but --strategy replaces it; use one of the two"
        )
    function, texts = _function(module), _params(path, module)
    if strategy is not None:
        chosen = load_strategy(strategy)
        texts |= {name: str(value) for name, value in chosen.params.items()}
        own = _job(path, module, FixedTrial(texts))
        file = JobFile(
            path, own, chosen, _steps(path, module), function, texts, _options(path, module)
        )
        return file.with_strategy(chosen)
    texts |= params or {}
    trial = FixedTrial(texts)
    try:
        job = _job(path, module, trial)
        chosen = _strategy(path, module, function, trial, params or {})
    except JobError:
        if params and function is not None:
            _check_names(path, module, function, texts, params)
        raise
    file = JobFile(path, job, chosen, _steps(path, module), function, texts, _options(path, module))
    return file.with_strategy(chosen)


def load_recipes(path: str | Path) -> None:
    """Run FILE.py for the recipes that it registers; raise JobError for a missing or broken file. It needs no job."""
    _run(Path(path))


def _job(path: Path, module: ModuleType, trial: FixedTrial | None = None) -> Job:
    """Return the file's job, or the one that its function of a trial makes of the given values."""
    from piper_runtime import Job

    job = getattr(module, "job", None)
    if callable(job) and trial is not None:
        with user_code("job(trial)", JobError):
            job = job(trial)
    if not isinstance(job, Job):
        actual = "no `job`" if job is None else f"a `job` that is a {type(job).__name__}"
        raise JobError(f"{path} defines {actual}; it must contain `job = piper.Job(...)`")
    return job


def _steps(path: Path, module: ModuleType) -> int:
    steps = getattr(module, "steps", 3)
    if type(steps) is not int or steps < 1:
        raise JobError(f"{path} defines steps = {steps!r}; an integer of at least 1 is needed")
    return steps


def _run(path: Path) -> ModuleType:
    try:
        source = path.read_bytes()
    except (OSError, ValueError) as e:
        advice = "give a Python file that defines `job` and `strategy`"
        raise JobError(unread("the file", path, e, advice)) from None
    name = f"piper_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        table = path.suffix.lower() == ".csv"
        hint = (
            f"; `piper show {path}` draws a schedule, and recipes.from_csv({str(path)!r}) is its directives"
            if table
            else ""
        )
        raise JobError(
            f"{path} is not a Python file; give a .py file that defines `job` and `strategy`{hint}"
        )
    from piper_runtime.rank import RECIPE_MARK

    module = importlib.util.module_from_spec(spec)
    setattr(module, RECIPE_MARK, str(path.resolve()))  # workers load the file again
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        # Bytes that are no text raise SyntaxError here; compile raises ValueError for null bytes in Python 3.11.2.
        importlib.util.decode_source(source)
        spec.loader.exec_module(module)
    except PiperError as e:
        if f"{path.name}:" not in str(e):
            e.line = _line(e, path, f"{path.name}, ")
        raise
    except (Exception, SystemExit) as e:  # the user's file may fail in any way
        raise JobError(
            f"{path} failed when it was run: {type(e).__name__}: {e}{_line(e, path)}"
        ) from e
    finally:
        sys.path.pop(0)
    return module


def _line(error: BaseException, path: Path, before: str = "") -> str:
    """Return where in the user's file an error happened, in parentheses, with `before` before the line."""
    if isinstance(error, SyntaxError):
        return f" ({before}line {error.lineno})" if error.lineno else ""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if Path(f.filename).resolve() == path.resolve()
    ]
    return f" ({before}line {frames[-1].lineno}: {frames[-1].line})" if frames else ""


def _options(path: Path, module: ModuleType) -> Options:
    """Return the file's `options` for the compiler; the usual ones if it has none, or that name is the user's own."""
    options = getattr(module, "options", None)
    if isinstance(options, str | Mapping):
        raise JobError(
            f"{path} defines `options` that is a {type(options).__name__}; a piper.Options is needed"
        )
    return options if isinstance(options, Options) else Options()


def _function(module: ModuleType) -> Callable[[Any], Any] | None:
    strategy = getattr(module, "strategy", None)
    return strategy if callable(strategy) else None


def _params(path: Path, module: ModuleType) -> dict[str, str]:
    """Return the file's own parameters, for a strategy that is a function of a trial."""
    own = getattr(module, "params", {})
    if _function(module) is None and not callable(getattr(module, "job", None)):
        return {}
    if not isinstance(own, Mapping):
        raise JobError(
            f"{path} defines `params` that is a {type(own).__name__}; a dict of the strategy's parameters is needed"
        )
    return {name: str(value) for name, value in own.items()}


def _strategy(
    path: Path,
    module: ModuleType,
    function: Callable[[Any], Any] | None,
    trial: FixedTrial,
    given: Mapping[str, str],
) -> Strategy:
    if function is not None:
        return _answered(path, function, trial, given)
    if given:
        raise JobError(f"{path}: -p gives parameters, but `strategy` is not a function of a trial")
    return _checked(path, getattr(module, "strategy", None))


def _answered(
    path: Path, function: Callable[[Any], Any], trial: FixedTrial, given: Iterable[str]
) -> Strategy:
    """Return the strategy of a function of a trial, which must ask for the parameters `given`."""
    with user_code("strategy(trial)", JobError):
        strategy = function(trial)
    trial.check_all_used(given)
    return _checked(path, strategy).with_params(trial.answers)


def _check_names(
    path: Path,
    module: ModuleType,
    function: Callable[[Any], Any],
    texts: Mapping[str, str],
    given: Iterable[str],
) -> None:
    """Raise JobError for a name among `given` that nothing asks for, which other names may be missing for."""
    trial = FirstChoices(texts)
    try:
        _job(path, module, trial)
        with user_code("strategy(trial)", JobError):
            function(trial)
    except PiperError:
        return  # other names may come after the failure, so that nothing is known of these
    trial.check_all_used(given)


def _checked(path: Path, strategy: Any) -> Strategy:
    if not isinstance(strategy, Strategy):
        actual = (
            "no `strategy`"
            if strategy is None
            else f"a `strategy` that is a {type(strategy).__name__}"
        )
        raise JobError(
            f"{path} defines {actual}; it must be a piper.Strategy, or a function of a trial that returns one"
        )
    return strategy
