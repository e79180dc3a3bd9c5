"""A worker keeps what it frees, so that a step's memory is not asked of the system again at each step."""

from __future__ import annotations

import subprocess
import sys

import pytest

from piper_runtime.rank.values.allocator import keep_freed_memory

PROGRAM = """
import ctypes, resource, sys
from importlib.util import module_from_spec, spec_from_file_location
if sys.argv[1]:
    spec = spec_from_file_location("allocator", sys.argv[1])
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
for step in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    parts = [libc.malloc(4 << 20) for _ in range(8)]
    for part in parts:
        ctypes.memset(part, 1, 4 << 20)
    for part in parts:
        libc.free(part)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
@pytest.mark.parametrize("kept", [True, False])
def test_memory_that_was_freed_is_used_again(kept: bool) -> None:
    """The third time no page is new; without the setting all 8192 are."""
    import piper_runtime.rank.values.allocator as module

    said = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM, str(module.__file__) if kept else ""],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(said.stdout) < 100 if kept else int(said.stdout) > 4000


@pytest.mark.parametrize(
    "said", [{"MALLOC_TRIM_THRESHOLD_": "0"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=0"}]
)
def test_what_a_user_has_set_stays(said: dict[str, str]) -> None:
    assert not keep_freed_memory(said)
