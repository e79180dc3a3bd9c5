"""A file with one wrong key or one wrong value gives one clear error that names it, and is never read in silence."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packages.interop.tests.jobs import ACCELERATE, DEEPSPEED, TRAINER, asked, write
from piper_interop import Imported, import_job
from piper_ir.ground.errors import JobError
from tests.helpers.cases import each_case

FILES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"deepspeed-{name}": ("deepspeed", options) for name, options in DEEPSPEED.items()},
    **{f"accelerate-{name}": ("accelerate", options) for name, options in ACCELERATE.items()},
    **{f"accelerate-{name}": ("accelerate", options) for name, options in TRAINER.items()},
}
"""The files, each with its system."""


def read(system: str, folder: Path, options: dict[str, Any]) -> Imported:
    """Return the imported job of options; the rows and the devices are given where the file does not say them."""
    launch = "num_processes" in options
    sets = ("per_device_train_batch_size=2",) if launch else ()
    devices = None if launch else 16
    return import_job(system, write(folder, options), asked(devices=devices, sets=sets))


def keys(options: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all keys of nested options."""
    for name, value in options.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from keys(value, (*above, name))


def changed(options: dict[str, Any], path: tuple[str, ...], key: str, value: Any) -> dict[str, Any]:
    """Return options in which the key at a path has another name and another value."""
    result = deepcopy(options)
    section = result
    for name in path[:-1]:
        section = section[name]
    kept = dict(section)
    section.clear()
    for name, old in kept.items():
        section[key if name == path[-1] else name] = value if name == path[-1] else old
    return result


def value_at(options: dict[str, Any], path: tuple[str, ...]) -> Any:
    """Return the value at a path."""
    value: Any = options
    for name in path:
        value = value[name]
    return value


CASES = [(name, path) for name, (_, options) in FILES.items() for path in keys(options)]


@each_case("name", FILES)
def test_the_files_are_read(tmp_path: Path, name: str) -> None:
    system, options = FILES[name]
    assert read(system, tmp_path, options).described.layout.devices == 16


@each_case(("name", "path"), CASES, ids=[f"{name}-{'.'.join(path)}" for name, path in CASES])
def test_a_renamed_key_is_named(tmp_path: Path, name: str, path: tuple[str, ...]) -> None:
    system, options = FILES[name]
    renamed = f"{path[-1]}_of_mine"
    with pytest.raises(JobError, match=renamed):
        read(system, tmp_path, changed(options, path, renamed, value_at(options, path)))


@each_case(("name", "path"), CASES, ids=[f"{name}-{'.'.join(path)}" for name, path in CASES])
def test_a_value_of_another_type_is_named(tmp_path: Path, name: str, path: tuple[str, ...]) -> None:
    system, options = FILES[name]
    value = value_at(options, path)
    wrong = {"a": [1]} if not isinstance(value, dict) else "a text"
    try:
        read(system, tmp_path, changed(options, path, path[-1], wrong))
    except JobError as error:
        assert path[-1] in str(error)
        return
    raise AssertionError(f"{'.'.join(path)}={wrong!r} was read in silence")


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(CASES),
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 10**12),
        st.floats(),
        st.text(max_size=5),
        st.lists(st.integers(), max_size=2),
        st.just({}),
        st.just({"a": {"b": 1}}),
        st.just("auto"),
    ),
)
def test_any_value_is_read_or_refused(
    tmp_path: Path, case: tuple[str, tuple[str, ...]], value: Any
) -> None:
    name, path = case
    system, options = FILES[name]
    try:
        imported = read(system, tmp_path, changed(options, path, path[-1], value))
    except JobError as error:
        assert str(error)
        return
    devices = (
        value if path == ("num_processes",) and isinstance(value, int | float) and value > 0 else 16
    )
    assert imported.described.layout.devices == devices
    assert imported.described.global_batch >= 1


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.text(max_size=40), st.sampled_from(["deepspeed", "accelerate"]))
def test_any_text_is_read_or_refused(tmp_path: Path, text: str, system: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    with pytest.raises(JobError):
        import_job(system, str(path), asked())
