"""Send a job's callables to other processes: by value in our own pipes, or by loading the recipe file again there."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # it has no types

from piper_ir.ground.errors import JobError
from piper_runtime.rank.sending.code_names import home_of, origin_of
from piper_runtime.rank.sending.module_state import ModuleState, module_state
from piper_runtime.rank.sending.process_settings import ProcessSettings

RECIPE_MARK = "__piper_recipe__"
"""The attribute of a module from a recipe file that holds the file's path; workers load it again by name."""


@dataclass(frozen=True)
class Parcel:
    """Hold callables on their way to another process.

    Attributes:
        recipes: file of each marked module that they need, by module name.
        definers: modules that define the model and the loss.
        body: the callables, pickled by cloudpickle.
        state: the variables of importable modules that they read.
        settings: the settings of the process that sends them.
    """

    recipes: dict[str, str]
    definers: tuple[str, ...]
    body: bytes
    state: ModuleState
    settings: ProcessSettings

    def open(self) -> Any:
        """Return the callables, in another process; raise JobError if they would read other values there."""
        for name, path in self.recipes.items():
            if name not in sys.modules:
                _load_recipe(name, path)
        callables = pickle.loads(self.body)
        self.settings.take()  # only now, since scripts set them behind their imports
        self.state.check()
        return callables

    def import_definers(self) -> None:
        """Run the modules that define model and loss, since they may register operators that the model's code calls."""
        for name in self.definers:
            importlib.import_module(name)


def pack(
    callables: Any, definers: Iterable[object] = (), operators: Iterable[object] = ()
) -> Parcel:
    """Return a nest of callables, packed; raise JobError when something cannot be sent.

    Objects of an importable module travel by name, objects of a marked recipe module as that file's path, all others by
    value. `definers` are callables that stay here, whose modules may register operators, and `operators` are the
    functions of the operators that the ranks call.
    """
    modules = {name: m for name, m in dict(sys.modules).items() if isinstance(m, ModuleType)}
    marked = {
        name: path
        for name, m in modules.items()
        if isinstance(path := vars(m).get(RECIPE_MARK), str)
    }  # getattr may run code
    mine = {
        name: m
        for name, m in modules.items()
        if name not in marked and name != "__main__" and _only_here(name, m)
    }
    known = cloudpickle.list_registry_pickle_by_value()  # a caller's own choice stays
    by_value = [m for name, m in mine.items() if m.__name__ == name and name not in known]
    for module in by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        body = cloudpickle.dumps(callables)
    except (TypeError, AttributeError, pickle.PicklingError) as e:
        raise JobError(
            f"the job's callables cannot be sent to worker processes: {e}; build such objects (open files, locks, "
            f"generators) inside of the callable, or define the job in a file of its own"
        ) from e
    finally:
        for module in by_value:
            cloudpickle.unregister_pickle_by_value(module)
    names = {getattr(d, "__module__", None) or "" for d in definers} - {"__main__", "", *mine}
    recipes = {
        name: path for name, path in marked.items() if name in names or name.encode() in body
    }
    state = module_state((callables, *operators), frozenset({*mine, *known}))
    return Parcel(recipes, tuple(sorted(names)), body, state, ProcessSettings.of_now())


def _load_recipe(name: str, path: str) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise JobError(f"the recipe {path} cannot be loaded again by a worker")
    module = importlib.util.module_from_spec(spec)
    setattr(module, RECIPE_MARK, path)
    sys.modules[name] = module
    sys.path.insert(0, str(Path(path).resolve().parent))  # the file may import its neighbours
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)


def _only_here(name: str, module: ModuleType) -> bool:
    """Return whether a new process with our sys.path would not find a module's Python file under its name."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py") or _in_library(file):
        return False
    if (
        home_of(name) == "known"
    ):  # a copy of a module of Piper's would have variables of its own beside the worker's
        return False
    origin = origin_of(name)
    return origin is None or Path(origin).resolve() != Path(file).resolve()


def _in_library(file: str) -> bool:
    return any(
        part in ("site-packages", "dist-packages") for part in Path(file).parts
    ) or file.startswith(sys.base_prefix)
