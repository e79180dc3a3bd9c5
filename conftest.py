"""Settings of the whole suite: beside pyproject.toml, because they hold for tests/ and for every packages/*/tests."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from piper_runtime.launch.processes import Pool

# The machine is shared by several test processes and by the workers that tests start, and the tensors are tiny: one thread per
# process is the fastest setting and makes float sums repeatable. It must be set before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

# Ray reads it when it is imported: who joins a cluster that a test has started shows the token that Ray keeps for this user.
os.environ.setdefault("RAY_AUTH_MODE", "token")

# The collector would look again and again at the million objects of torch's modules, which stay for ever.
gc.set_threshold(50_000, 20, 20)

# A test outcome may depend neither on the machine's speed nor on what an earlier run left in a database.
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
# `make test-long` looks at new examples every time and prints how to reproduce the one that failed.
settings.register_profile("long", deadline=None, derandomize=False, database=None, max_examples=1000, print_blob=True)
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def runs_take_the_cpu() -> None:
    """Also on a machine with a CUDA device: the suite compares bits and bytes of the CPU. Tests of CUDA ask for it."""
    if "piper_runtime.rank.device" in sys.modules:  # to import it here would load torch for tests that need none
        sys.modules["piper_runtime.rank.device"].default = "cpu"


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Processes for plans of up to four ranks, started once per test process: a worker's imports take seconds.

    A test whose run fails makes a pool of its own, since workers are started again after it.
    """
    from piper_runtime.launch.processes import Pool

    with Pool(4) as workers:
        yield workers


_CLUSTER = """
import sys
from piper_runtime.launch.ray_cluster import connect
link = connect("local", 4)
print(link.ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
link.close()
"""


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """A Ray cluster of one node with four CPUs, in a process of its own; who joins it by its address leaves it again."""
    pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    host = subprocess.Popen([sys.executable, "-c", _CLUSTER], start_new_session=True, **pipes)
    assert host.stdout is not None
    yield host.stdout.readline().strip()
    host.communicate(timeout=60)


TOGETHER: dict[str, tuple[str, ...]] = {
    "captured models and worker processes": (
        "tests/test_parity.py",
        "tests/test_memory_truth.py",
        "tests/test_mutants.py",
        "tests/test_compositions.py",
        "tests/test_parity_processes.py",
        "tests/test_schedules.py",
        "tests/test_resume_strategies.py",
        "tests/test_collectives.py",
        "tests/test_emulation.py",
        "tests/test_own_cost_model.py",
        "tests/test_profiling.py",
        "tests/test_batch_time.py",
        "tests/test_sharding.py",
        "tests/test_recompute.py",
        "tests/test_mixed_precision.py",
        "tests/test_mixed_sharded.py",
        "tests/test_resume_strategies.py",
        "tests/test_explain.py",
        "packages/compiler/tests/test_capture_parity.py",
        "packages/compiler/tests/test_capture_sizes.py",
        "packages/compiler/tests/test_cut.py",
        "packages/compiler/tests/test_opaque.py",
        "packages/compiler/tests/test_tags.py",
    ),
    "a Ray cluster": (
        "packages/runtime/tests/test_runtime_ray.py",
        "packages/autotune/tests/test_tuner_ray.py",
        "tests/test_executors.py",
        "packages/runtime/tests/test_runtime_processes.py",
        "packages/runtime/tests/test_checkpoint_resume.py",
    ),
}
"""Files that share what takes long to make: of `make test`'s processes, one takes all files of an entry."""
LONG = (
    "tests/test_bench_smoke.py",
    "packages/runtime/tests/test_runtime_torchrun.py",
    "tests/test_cli.py",
    "packages/compiler/tests/test_zero_bubble.py",
)
"""Other files that take long: whoever has one of them last leaves the other processes idle."""
_UNIT_OF_FILE = {file: unit for unit, files in TOGETHER.items() for file in files}
_FIRST = {file: k for k, file in enumerate((*_UNIT_OF_FILE, *LONG))}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put what takes long first, where several processes share the work."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _FIRST.get(item.nodeid.split("::", 1)[0], len(_FIRST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal out files as `--dist loadfile` does, in their order, and those of TOGETHER as one."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return _UNIT_OF_FILE.get(file, file)

    config.option.loadscopereorder = False
    return Scheduling(config, log)
