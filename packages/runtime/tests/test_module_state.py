"""What callables read of modules is compared between processes; caches and what they load themselves is not."""

from __future__ import annotations

import contextvars
import functools
import importlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from packages.runtime.tests.chains import CODE, chain, run
from piper_ir.ground.errors import JobError
from piper_runtime.launch.ground.request import Attempt, make_requests
from piper_runtime.launch.ground.run_options import RunOptions
from piper_runtime.rank.binding.evaluation import Evaluation
from piper_runtime.rank.job.job import materialize
from piper_runtime.rank.sending.shipping import Parcel, pack

NAME = "weather_data"
SOURCE = """
import argparse, dataclasses, functools, itertools, os, random
from collections import OrderedDict
import numpy, torch
import torch.nn.functional as F

SCALE = 1.0
OPTIONS = {"noise": {"scale": 0.5}, "names": ["wind", "rain"]}
ARGUMENTS = argparse.Namespace(station="north")
MEANS = torch.tensor([1.0, 2.0])
TABLE = numpy.arange(4)
SHARE = numpy.float32(0.5)
UNREAD = 1
_CACHE = {}
_LOADED = None
CALLS = 0
STARTED = random.random()
GENERATOR = random.Random(0)
COUNTS = itertools.count()


@dataclasses.dataclass
class Window:
    width: int = 3


WINDOW = Window()


def normed(x):
    return x / 2


class Stations:
    height = 10.0

    def __init__(self):
        self.rows = None
        self.unit = 1.0

    def set_unit(self, unit):
        self.unit = unit

    def load(self):
        if self.rows is None:
            self.rows = [1.0, 2.0]
        return self.rows

    @functools.cached_property
    def table(self):
        return list(range(5))


STATIONS = Stations()


def set_scale(scale):
    global SCALE
    SCALE = scale


@functools.lru_cache
def cached(step):
    return step * SCALE


def batch(step, rows, window=Window(4)):
    global _LOADED, CALLS
    CALLS += 1
    if _LOADED is None:
        _LOADED = [3.0]
    _CACHE[step] = cached(step)
    GENERATOR.random(), next(COUNTS)
    found = {}
    found["x"] = normed(MEANS * OPTIONS["noise"]["scale"] + float(TABLE[1] + SHARE)) * WINDOW.width
    found["y"] = F.one_hot(torch.tensor(STATIONS.load()[0] * STATIONS.unit * len(STATIONS.table)).long(), 9)
    return found, ARGUMENTS.station, Stations.height, window.width, WINDOW.width
"""


@pytest.fixture
def weather(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module that every process can import."""
    (tmp_path / f"{NAME}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    dtype = torch.get_default_dtype()
    yield importlib.import_module(NAME)
    torch.set_default_dtype(dtype)
    sys.modules.pop(NAME, None)


def opened(parcel: Parcel) -> Any:
    """What a process that has imported nothing yet takes out of a parcel."""
    sys.modules.pop(NAME, None)
    return pickle.loads(pickle.dumps(parcel)).open()


def replaced(step: int) -> int:
    return step


INNER = """
import contextvars, importlib, numpy, threading, time, torch, uuid, weakref
from weather_data import SCALE

MIXED = numpy.array([1, "a"], dtype=object)
MASKED = numpy.ma.array([1, 2, 3], mask=[0, 0, 0])
DEPTH = contextvars.ContextVar("depth", default=1)
LOCAL = threading.local()
LOCAL.level = 1


class Kind(type):
    share = 1


class Station(metaclass=Kind):
    height = 1


STATION = Station()
NEAREST = weakref.ref(STATION)


def made(share):
    def scaled(x):
        return x * share

    return scaled


def kept(function):
    seen = {}

    def run(x):
        if x not in seen:
            seen[x] = function(x)
        return seen[x]

    return run


SCALED = made(2)


@kept
def squared(x):
    return x * x


def by_statement():
    import weather_data
    return weather_data.SCALE


def by_items():
    from weather_data import SCALE
    return SCALE


def by_name():
    return importlib.import_module("weather_data").SCALE


def by_globals():
    return globals()["SCALE"]


PAIRS = {(1, 2)}
NET = torch.nn.Linear(2, 2, bias=False)
torch.nn.init.ones_(NET.weight)
LIMIT = 5
STARTED = time.time()
RUN = f"run-{uuid.uuid4().hex}"


class Clock:
    def __init__(self):
        self.begun = time.perf_counter()

    def seconds(self):
        return time.perf_counter() - self.begun


CLOCK = Clock()


class Numbered:
    count = 0

    def __init__(self):
        Numbered.count += 1
        self.number = type(self).count


def timed():
    Numbered()
    return RUN[:4], time.time() - STARTED, CLOCK.seconds()


def batch():
    PAIRS, NET, LIMIT
    return squared(3), SCALED(1), MIXED[0], MASKED.sum(), DEPTH.get(), LOCAL.level, Station.share, NEAREST()
"""
DEEPER: dict[str, tuple[str, Callable[[Any], object]]] = {
    f"{NAME}.SCALE is 3.0": ("by_statement", lambda m: setattr(sys.modules[NAME], "SCALE", 3.0)),
    f"{NAME}.SCALE is 4.0": ("by_items", lambda m: setattr(sys.modules[NAME], "SCALE", 4.0)),
    f"{NAME}.SCALE is 5.0": ("by_name", lambda m: setattr(sys.modules[NAME], "SCALE", 5.0)),
    ".SCALE is 6.0": ("by_globals", lambda m: setattr(m, "SCALE", 6.0)),
    ".SCALED(variable share) is 7": ("batch", lambda m: setattr(m, "SCALED", m.made(7))),
    ".MIXED[:] is [8, 'a'] in": ("batch", lambda m: m.MIXED.__setitem__(0, 8)),
    ".MASKED._mask (a ndarray": ("batch", lambda m: m.MASKED.__setitem__(0, m.numpy.ma.masked)),
    ".DEPTH.get() is 9": ("batch", lambda m: m.DEPTH.set(9)),
    ".LOCAL.level is 10": ("batch", lambda m: setattr(m.LOCAL, "level", 10)),
    ".Kind.share is 11": ("batch", lambda m: setattr(m.Kind, "share", 11)),
    ".PAIRS is a set of 2": ("batch", lambda m: m.PAIRS.add((3, 4))),
    ".NET.weight (a tensor": ("batch", lambda m: torch.nn.init.zeros_(m.NET.weight)),
    ".LIMIT is not set in the launcher and 5": ("batch", lambda m: delattr(m, "LIMIT")),
    ".NEAREST().height is 12": ("batch", lambda m: setattr(m.STATION, "height", 12)),
}


CHANGES: dict[str, Callable[[Any], object]] = {
    f"{NAME}.SCALE is 3.0 in the launcher and 1.0 in the worker": lambda m: setattr(
        m, "SCALE", 3.0
    ),
    f"{NAME}.SCALE is 4.0 ": lambda m: m.set_scale(4.0),
    f"{NAME}.OPTIONS['noise']['scale'] is 0.9 in the launcher and 0.5 ": lambda m: m.OPTIONS[
        "noise"
    ].update(scale=0.9),
    f"{NAME}.OPTIONS['more'] is 1 in the launcher and not set in": lambda m: m.OPTIONS.update(
        more=1
    ),
    f"{NAME}.ARGUMENTS.station is 'south' ": lambda m: setattr(m.ARGUMENTS, "station", "south"),
    f"{NAME}.MEANS (a tensor of torch.float32 [2]) is another one": lambda m: m.MEANS.add_(1.0),
    f"{NAME}.TABLE (a ndarray of 'l' [4]) is another one": lambda m: m.TABLE.__setitem__(0, 7),
    f"{NAME}.SHARE is np.float32(0.75) in": lambda m: setattr(m, "SHARE", m.numpy.float32(0.75)),
    f"{NAME}.WINDOW.width is 5 ": lambda m: setattr(m.WINDOW, "width", 5),
    f"{NAME}.batch(default 0).width is 6 ": lambda m: setattr(m.batch.__defaults__[0], "width", 6),
    f"{NAME}.Stations.height is 2.0 ": lambda m: setattr(m.Stations, "height", 2.0),
    f"{NAME}.STATIONS.unit is 2.0 ": lambda m: m.STATIONS.set_unit(2.0),
    f"{NAME}.cached is the function {__name__}.replaced ": lambda m: setattr(m, "cached", replaced),
    f"{NAME}.Stations.load is the function {__name__}.": lambda m: setattr(
        m.Stations, "load", lambda self: [5.0]
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_script_has_set_in_a_module_is_refused_by_name(weather: Any, change: str) -> None:
    CHANGES[change](weather)
    with pytest.raises(JobError) as error:
        opened(pack(weather.batch))
    assert change in str(error.value) and "functools.partial" in str(error.value)


@pytest.fixture
def stations(weather: ModuleType, tmp_path: Path) -> Iterator[ModuleType]:
    """A second module, with values that lie further inside, and functions that import."""
    (tmp_path / "weather_stations.py").write_text(INNER)
    yield importlib.import_module("weather_stations")
    sys.modules.pop("weather_stations", None)


@pytest.mark.parametrize("change", DEEPER)
def test_what_lies_further_inside_is_refused_by_name(stations: Any, change: str) -> None:
    name, make = DEEPER[change]
    contextvars.copy_context().run(differs, stations, name, make, change)


def differs(stations: Any, name: str, make: Callable[[Any], object], change: str) -> None:
    make(stations)
    parcel = pack(getattr(stations, name))
    sys.modules.pop("weather_stations")
    with pytest.raises(JobError) as error:
        contextvars.Context().run(opened, parcel)
    assert change in str(error.value)


def test_a_cache_in_a_function_around_is_not_compared(stations: Any) -> None:
    stations.squared(4)
    parcel = pack(stations.batch)
    sys.modules.pop("weather_stations")
    assert opened(parcel)()[0] == 9


def test_times_names_of_a_process_and_counts_of_objects_are_not_compared(stations: Any) -> None:
    stations.Numbered()
    parcel = pack(stations.timed)
    sys.modules.pop("weather_stations")
    assert opened(parcel)()[0] == "run-"


def test_a_module_that_makes_its_names_by_code_is_not_asked(stations: Any) -> None:
    vars(stations)["__getattr__"] = lambda name: {}[name]
    pack(stations.batch)


def test_a_replaced_function_of_torch_is_refused(
    weather: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.functional, "one_hot", lambda x, n: torch.zeros(n))
        parcel = pack(weather.batch)
    with pytest.raises(
        JobError,
        match=r"torch.nn.functional.one_hot is the function .*lambda> in the launcher and the "
        r"function",
    ):
        opened(parcel)


def test_a_file_that_has_changed_since_it_was_imported_is_refused(weather: Any) -> None:
    parcel = pack(functools.partial(weather.batch, 0))
    path = Path(str(weather.__file__))
    path.write_text(SOURCE.replace("return x / 2", "return x / 3"))
    os.utime(path, (1, 1))
    with pytest.raises(
        JobError, match=rf"{NAME}.normed \(the function {NAME}.normed\) is another one"
    ):
        opened(parcel)


def test_caches_counters_and_what_nobody_reads_are_not_compared(weather: Any) -> None:
    weather.UNREAD = 2
    for step in range(3):
        weather.batch(step, range(2))
    assert (
        weather._CACHE
        and weather._LOADED
        and weather.CALLS == 3
        and weather.STATIONS.rows
        and vars(weather.STATIONS)["table"]
    )
    again = opened(pack(weather.batch))
    assert again is not weather.batch and torch.equal(
        again(0, range(2))[0]["x"], weather.batch(0, range(2))[0]["x"]
    )


def test_what_travels_whole_is_not_compared(weather: Any) -> None:
    def batch(step: int, given: object, rows: range) -> object:
        return weather.SCALE, replaced(step)

    stations = weather.Stations()
    stations.rows, stations.unit = [7.0], 3.0
    assert opened(pack(functools.partial(batch, 0, stations)))(rows=range(1)) == (1.0, 0)


def test_what_code_that_travels_whole_reads_of_a_module_is_compared(weather: Any) -> None:
    weather.SCALE = 2.0
    with pytest.raises(JobError, match=rf"{NAME}.SCALE is 2.0"):
        opened(pack(lambda step, rows: weather.SCALE))


def test_workers_have_the_default_dtype(weather: Any) -> None:
    torch.set_default_dtype(torch.float64)
    parcel = pack(weather.batch)
    torch.set_default_dtype(torch.float32)
    opened(parcel)
    assert torch.get_default_dtype() is torch.float64


def test_an_attribute_of_a_function_is_compared(weather: Any) -> None:
    weather.normed.scale = 3.0
    with pytest.raises(JobError, match=rf"{NAME}.normed.scale is 3.0 in the launcher and not set"):
        opened(pack(weather.batch))


def test_a_run_in_processes_is_refused(weather: Any) -> None:
    plan, job = chain(dp=2, pp=1, microbatches=1)
    weather.SCALE = 3.0

    def scaled(step: int, rows: range) -> object:
        x, y = job.batch(step, rows)
        return x, y * weather.SCALE

    with pytest.raises(
        JobError, match=f"{NAME}.SCALE is 3.0 in the launcher and 1.0 in the worker"
    ):
        run(plan, replace(job, batch=scaled), launcher="processes")


@pytest.mark.parametrize("field", ["optimizer", "scheduler", "evaluation"])
def test_every_callable_that_ranks_call_is_looked_at(field: str, weather: Any) -> None:
    plan, job = chain(dp=2, pp=1, microbatches=1)
    make, evaluation = job.optimizer, None
    assert callable(make)
    weather.SCALE = 3.0
    if field == "optimizer":
        job = replace(job, optimizer=lambda named: (weather.SCALE, make(named))[1])
    elif field == "scheduler":
        job = replace(
            job,
            scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(
                optimizer, weather.SCALE
            ),
        )
    else:
        evaluation = Evaluation(
            plan, {**CODE}, lambda step, rows: weather.SCALE, every=1, batches=1
        )
    options = RunOptions(steps=1, evaluation=evaluation)
    requests = make_requests(Attempt(plan, {**CODE}, job, materialize(job), options))
    with pytest.raises(
        JobError, match=f"{NAME}.SCALE is 3.0 in the launcher and 1.0 in the worker"
    ):
        opened(pickle.loads(requests[0].callables))
