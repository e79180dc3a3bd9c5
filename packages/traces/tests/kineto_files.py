"""Write files as torch's profiler does: traces of devices, with launches, messages and named ranges."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class KinetoFile:
    """Collect the events of a trace; times are in microseconds."""

    rank: int = 0
    world: int = 2
    events: list[dict[str, Any]] = field(default_factory=list)
    launches: int = 0

    def range(self, name: str, start: float, end: float, thread: int = 1) -> None:
        """Add a range that a program has named."""
        self._add("user_annotation", name, start, end, thread, {})

    def kernel(
        self,
        name: str,
        start: float,
        end: float,
        *,
        launched: float,
        stream: int = 7,
        cat: str = "kernel",
        **args: Any,
    ) -> None:
        """Add a kernel, with the call that launched it, which ended at `launched`."""
        self.launches += 1
        here = {"correlation": self.launches}
        self._add("cuda_runtime", "cudaLaunchKernel", launched - 1, launched, 1, here)
        self._add(cat, name, start, end, stream, {"stream": stream} | here | args)

    def message(
        self, op: str, nbytes: int, ranks: Sequence[int], start: float, end: float, launched: float
    ) -> None:
        """Add a message of NCCL with the arguments that torch records from 2.4 on."""
        args = {
            "Collective name": op,
            "In msg nelems": nbytes // 4,
            "Out msg nelems": nbytes // 4,
            "Group size": len(ranks),
            "dtype": "Float",
            "Process Group Name": "7",
            "Process Group Description": "undefined",
            "Process Group Ranks": str(list(ranks)),
        }
        name = f"ncclDevKernel_{op}"
        self.kernel(name, start, end, launched=launched, stream=20, **args)

    def operator(self, name: str, start: float, end: float, thread: int = 1) -> None:
        """Add an operator on the CPU."""
        self._add("cpu_op", name, start, end, thread, {})

    def write(self, folder: Path, **more: Any) -> Path:
        """Write the file and return its path."""
        document = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
            "distributedInfo": {"backend": "nccl", "rank": self.rank, "world_size": self.world},
            "baseTimeNanoseconds": 1_000_000_000,
            "traceEvents": self.events,
        }
        path = folder / f"rank{self.rank}_trace.json.gz"
        path.write_bytes(gzip.compress(json.dumps(document | more).encode()))
        return path

    def _add(
        self, cat: str, name: str, start: float, end: float, thread: int, args: dict[str, Any]
    ) -> None:
        place = {"pid": 1, "tid": thread, "ts": start, "dur": end - start}
        self.events.append({"ph": "X", "cat": cat, "name": name, **place, "args": args})
