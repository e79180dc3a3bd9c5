"""Start ranks in this process, in processes, under torchrun or on Ray, watch them, and put their results together.

May import: data, weights, rank, checkpoint, engine, transport, profile.
"""

from piper_runtime.launch.ground.protocol import Failure
from piper_runtime.launch.ground.report import Interrupted, StepRecord, measured_counter
from piper_runtime.launch.ground.restart import Replan, Restart
from piper_runtime.launch.ground.result import WARMUP_STEPS, Run
from piper_runtime.launch.ground.run_options import FurtherOptions, RunOptions
from piper_runtime.launch.ground.workers import Launcher, LauncherKind, Workers
from piper_runtime.launch.processes.emulation import Durations, Emulation, emulate
from piper_runtime.launch.processes.processes import Pool
from piper_runtime.launch.ray.ray_cluster import RayWording, connect
from piper_runtime.launch.running.inline_run import rank_job
from piper_runtime.launch.running.launchers import launcher_kind, open_pool
from piper_runtime.launch.running.run import check_float8, check_request, execute, run_plan
from piper_runtime.launch.torchrun.command_lines import Launch, launch_sections, launch_text
from piper_runtime.launch.torchrun.torchrun import is_first, is_first_to_say

__all__ = [
    "Durations",
    "Emulation",
    "Failure",
    "FurtherOptions",
    "Interrupted",
    "Launch",
    "Launcher",
    "LauncherKind",
    "Pool",
    "RayWording",
    "Replan",
    "Restart",
    "Run",
    "RunOptions",
    "StepRecord",
    "WARMUP_STEPS",
    "Workers",
    "check_float8",
    "check_request",
    "connect",
    "emulate",
    "execute",
    "is_first",
    "is_first_to_say",
    "launch_sections",
    "launch_text",
    "measured_counter",
    "launcher_kind",
    "open_pool",
    "rank_job",
    "run_plan",
]
