"""Run the bound instructions of a rank in the plan's order, on streams of the CPU or a device; record times and memory.

May import: rank.
"""

from piper_runtime.engine.core_shares import core_share, core_sharers
from piper_runtime.engine.cuda_streams import CudaApi, CudaStreams, StagedStreams
from piper_runtime.engine.engine import Engine, host_clock
from piper_runtime.engine.memory import MemoryRecord
from piper_runtime.engine.streams import HEART_SLOTS, CpuStreams, Posted

__all__ = [
    "CpuStreams",
    "CudaApi",
    "CudaStreams",
    "Engine",
    "host_clock",
    "HEART_SLOTS",
    "MemoryRecord",
    "Posted",
    "StagedStreams",
    "core_share",
    "core_sharers",
]
