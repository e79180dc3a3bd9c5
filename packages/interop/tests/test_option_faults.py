"""A file with one wrong key or one wrong value gives one clear error that names it, and is never read in silence."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packages.interop.tests.jobs import ACCELERATE, DEEPSPEED, TRAINER, asked, write
from piper_interop import Imported, import_job
from piper_interop.neutral.documents import options_of
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


MERGED = """
fsdp_config: &of_all
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_version: 1
other: {<<: [*of_all, {more: 1}], fsdp_version: 2}
"""


def test_keys_of_yaml_merge_mappings(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(MERGED)
    found = {name: option.value for name, option in options_of(str(path)).items()}
    assert found.items() >= yaml_as_read(MERGED).items()
    path.write_text("a: &b {<<: *b, c: 1}")
    with pytest.raises(JobError, match="merges others over more than"):
        options_of(str(path))
    path.write_text("a: {<<: [1]}")
    with pytest.raises(JobError, match=r"job\.yaml:1: << merges mappings alone"):
        options_of(str(path))


def yaml_as_read(text: str) -> dict[str, Any]:
    """Return the options as PyYAML reads them."""
    sections = yaml.safe_load(text).items()
    return {f"{s}.{name}": value for s, section in sections for name, value in section.items()}


@each_case(
    ("above", "says"),
    [("[{0}]", "a value has more than 10,000 items"), ("{{x: {0}, y: {0}}}", "more than 10,000 options")],
)  # fmt: skip
def test_aliases_of_aliases_end(tmp_path: Path, above: str, says: str) -> None:
    lines = ["a0: &a0 [1, 2, 3]"]
    for k in range(1, 15):
        below = f"*a{k - 1}" if "x" in above else f"*a{k - 1}, *a{k - 1}"
        lines.append(f"a{k}: &a{k} {above.format(below)}")
    path = tmp_path / "job.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(JobError, match=says) as raised:
        import_job("accelerate", str(path), asked())
    assert len(str(raised.value)) < 500


def test_long_values_are_cut_in_messages(tmp_path: Path) -> None:
    options = {**DEEPSPEED["zero3"], "train_batch_size": "x" * 100_000}
    with pytest.raises(JobError, match=r"train_batch_size='x+") as raised:
        import_job("deepspeed", write(tmp_path, options), asked())
    assert len(str(raised.value)) < 1000


@each_case("power", [1024, -5000])
def test_a_scale_of_the_loss_is_a_number(tmp_path: Path, power: int) -> None:
    options = {"train_batch_size": 16, "fp16": {"enabled": True, "initial_scale_power": power}}
    with pytest.raises(JobError, match=r"initial_scale_power.*from -126 to 127"):
        import_job("deepspeed", write(tmp_path, options), asked())
