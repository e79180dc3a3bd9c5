"""Settings of the whole suite: beside pyproject.toml, because they hold for tests/ and for every packages/*/tests."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from piper_runtime.launch.processes.processes import Pool

# The machine is shared by several test processes and by the workers that tests start, and the tensors are tiny: one
# thread per process is the fastest setting and makes float sums repeatable. It must be set before anything imports
# torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

# No test may take a capture that an earlier run left in the user's cache.
os.environ["PIPER_CACHE"] = ""

# Ray reads it when it is imported: who joins a cluster that a test has started shows the token that Ray keeps for this
# user.
os.environ.setdefault("RAY_AUTH_MODE", "token")

# The collector would look again and again at the million objects of torch's modules, which stay for ever.
gc.set_threshold(50_000, 20, 20)

# A test outcome may depend neither on the machine's speed nor on what an earlier run left in a database.
settings.register_profile("ci", deadline=None, derandomize=True, database=None, max_examples=50)
# `make test-long` looks at new examples every time and prints how to reproduce the one that failed.
settings.register_profile(
    "long", deadline=None, derandomize=False, database=None, max_examples=100, print_blob=True
)
settings.load_profile("ci")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep what is compiled of tests and of Piper, also under PYTHONDONTWRITEBYTECODE: the suite starts a hundred
    processes.

    Recipes that tests write are not kept: one that is written again in the same second would be taken for the first.
    """
    asked, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = asked


@pytest.fixture(scope="session", autouse=True)
def interrupts_are_heard() -> None:
    """Let the suite and what it starts hear SIGINT, which a background job of a shell is started to ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def runs_take_the_cpu() -> None:
    """Also on a machine with a CUDA device: the suite compares bits and bytes of the CPU. Tests of CUDA ask for it."""
    if (
        "piper_runtime.rank.values.device" in sys.modules
    ):  # to import it here would load torch for tests that need none
        sys.modules["piper_runtime.rank.values.device"].default = "cpu"


DRAWING = "packages/report/"
"""The folder of tests that look at drawings."""
NOT_DRAWN = {"png": b"\x89PNG\r\n\x1a\n", "svg": b'<svg xmlns="http://www.w3.org/2000/svg"/>'}


@pytest.fixture(autouse=True)
def figures_are_not_rendered(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make the figures of a report, but render them for the tests of reports only.

    Rendering takes ten times as long as the command that writes the report.
    """
    style = sys.modules.get("piper_report.figures.style")
    if style is None or request.node.nodeid.startswith(DRAWING):
        yield
        return
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(style, "rendered", lambda figure, kind: NOT_DRAWN[kind])
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Processes for plans of up to four ranks, started once per test process: a worker's imports take seconds.

    A test whose run fails makes a pool of its own, since workers are started again after it.
    """
    from piper_runtime.launch.processes.processes import Pool

    with Pool(4) as workers:
        yield workers


_CLUSTER = """
import sys
from piper_runtime.launch.ray.ray_cluster import connect
link = connect("local", 4)
print(link.ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
link.close()
"""


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """A Ray cluster of one node with four CPUs, in a process of its own; who joins it by its address leaves it
    again."""
    pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    host = subprocess.Popen([sys.executable, "-c", _CLUSTER], start_new_session=True, **pipes)
    assert host.stdout is not None
    yield host.stdout.readline().strip()
    host.communicate(timeout=60)


TOGETHER: dict[str, tuple[str, ...]] = {
    "captured models and worker processes": (
        "tests/parity/test_parity.py",
        "tests/predictions/test_memory_truth.py",
        "tests/faults/test_mutants.py",
        "tests/parity/test_compositions.py",
        "tests/parity/test_empty_stages.py",
        "tests/parity/test_schedules.py",
        "tests/runs/test_resume_strategies.py",
        "tests/parity/test_collectives.py",
        "tests/predictions/test_emulation.py",
        "tests/predictions/test_own_cost_model.py",
        "tests/runs/test_profiling.py",
        "tests/runs/test_batch_time.py",
        "tests/parity/test_sharding.py",
        "tests/parity/test_recompute.py",
        "tests/parity/test_mixed_precision.py",
        "tests/parity/test_mixed_sharded.py",
        "tests/predictions/test_explain.py",
        "tests/parity/test_recompute_bf16.py",
        "tests/predictions/test_memory_snapshot.py",
        "tests/parity/test_settled_values.py",
        "tests/parity/test_sharded_tables.py",
        "tests/parity/test_parity_judge.py",
        "tests/parity/test_recompute_refused.py",
        "tests/predictions/test_recompute_costs.py",
        "tests/predictions/test_memory_copies.py",
        "packages/capture/tests/test_layout_indexes.py",
        "packages/capture/tests/test_capture_parity.py",
        "packages/capture/tests/test_capture_sizes.py",
        "packages/capture/tests/test_cut.py",
        "packages/capture/tests/test_opaque.py",
        "packages/capture/tests/test_tags.py",
    ),
    "captures that devices share": (
        "tests/parity/test_tensor_parallel.py",
        "tests/parity/test_pieces.py",
        "tests/parity/test_context_parallel.py",
        "tests/parity/test_tensor_parallel_vocabulary.py",
        "tests/parity/test_mixed_shared.py",
        "tests/runs/test_shared_recovery.py",
        "tests/predictions/test_simulated_layouts.py",
        "tests/cli/test_shard_refused.py",
        "tests/predictions/test_explain_layouts.py",
        "tests/predictions/test_shard_sizes.py",
        "tests/parity/test_sums_between_chunks.py",
        "tests/parity/test_expert_parallel.py",
        "tests/runs/test_expert_runs.py",
        "tests/parity/test_shared_optimizers.py",
        "tests/parity/test_shared_halves.py",
        "tests/parity/test_shared_means.py",
        "tests/parity/test_shared_tables.py",
        "tests/predictions/test_explain_shared_states.py",
    ),
    "dropless mixtures": (
        "tests/parity/test_dropless.py",
        "tests/parity/test_dropless_experts.py",
        "tests/predictions/test_expert_work.py",
        "tests/predictions/test_expert_loads.py",
        "tests/predictions/test_tuned_load.py",
    ),
    "losses": (
        "tests/parity/test_losses.py",
        "tests/parity/test_own_losses.py",
    ),
    "steps of chunks, each traced once": (
        "packages/capture/tests/test_joint_parity.py",
        "packages/capture/tests/test_phases_memory.py",
        "packages/capture/tests/test_phases.py",
        "packages/capture/tests/test_codegen.py",
    ),
    "sources, each parsed once": (
        "tests/house/test_layers.py",
        "tests/house/test_folders.py",
        "tests/house/test_documents.py",
        "tests/house/test_names.py",
        "tests/house/test_prose.py",
        "tests/cli/test_advice_names.py",
    ),
    "a Ray cluster": (
        "packages/runtime/tests/test_runtime_ray.py",
        "packages/autotune/tests/test_tuner_ray.py",
        "tests/runs/test_executors.py",
        "packages/runtime/tests/test_runtime_processes.py",
        "packages/runtime/tests/test_checkpoint_resume.py",
    ),
}
"""Files that share what takes long to make: of `make test`'s processes, one takes all files of an entry."""
LONG = (
    "tests/parity/test_compiled_kernels.py",
    "tests/benches/test_bench_smoke.py",
    "packages/runtime/tests/test_runtime_torchrun.py",
    "tests/cli/test_cli.py",
    "packages/compiler/tests/test_zero_bubble.py",
)
"""Other files that take long: whoever has one of them last leaves the other processes idle."""
_UNIT_OF_FILE = {file: unit for unit, files in TOGETHER.items() for file in files}
_FIRST = {file: k for k, file in enumerate((*_UNIT_OF_FILE, *LONG))}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is left to `make test-long`; put what takes long first, where several processes share the work."""
    cases: Counter[str] = Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None and "long" not in item.keywords:
            (n,) = sampled.args
            test = item.nodeid.split("[", 1)[0]
            k = cases[test]
            cases[test] += 1
            # Another place in every n, so that what follows in steps of n is not left out altogether.
            if (k + k // n) % n:
                item.add_marker("long")
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
