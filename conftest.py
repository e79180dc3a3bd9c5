"""Settings of the whole suite: beside pyproject.toml, because they hold for tests/ and for every packages/*/tests."""

import os
import sys

import pytest
from hypothesis import settings

# The machine is shared by several test processes and by the workers that tests start, and the tensors are tiny: one thread per
# process is the fastest setting and makes float sums repeatable. It must be set before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

# Ray reads it when it is imported: who joins a cluster that a test has started shows the token that Ray keeps for this user.
os.environ.setdefault("RAY_AUTH_MODE", "token")

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
