"""Start ranks in this process, in processes, under torchrun or on Ray, watch them, and put their results together.

May import: data, weights, rank, checkpoint, engine, transport, profile.
"""

from piper_runtime.launch.command_lines import launch_sections, launch_text
from piper_runtime.launch.emulation import Durations, Emulation, emulate
from piper_runtime.launch.inline_run import rank_job
from piper_runtime.launch.launchers import Launcher, Workers, check_launcher, check_startable, open_pool
from piper_runtime.launch.processes import Pool
from piper_runtime.launch.protocol import Failure
from piper_runtime.launch.ray_cluster import RayWording, connect
from piper_runtime.launch.recovery import Replan, Restart
from piper_runtime.launch.report import Interrupted, StepRecord, measured_counter
from piper_runtime.launch.result import WARMUP_STEPS, Run
from piper_runtime.launch.run import check_request, execute
from piper_runtime.launch.torchrun import is_first, is_first_to_say

__all__ = [
    "Durations",
    "Emulation",
    "Failure",
    "Interrupted",
    "Launcher",
    "Pool",
    "RayWording",
    "Replan",
    "Restart",
    "Run",
    "StepRecord",
    "WARMUP_STEPS",
    "Workers",
    "check_launcher",
    "check_request",
    "check_startable",
    "connect",
    "emulate",
    "execute",
    "is_first",
    "is_first_to_say",
    "launch_sections",
    "launch_text",
    "measured_counter",
    "open_pool",
    "rank_job",
]
