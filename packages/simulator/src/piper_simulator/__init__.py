"""Predict time and memory of a plan on a cluster, without a GPU and without PyTorch.

Other packages import its names from here. The folders build on each other in this order: `cluster`, `durations`,
`contention`, `times`, `memory`, `explanation`; `simulation` puts them together.
"""

from piper_simulator.cluster.checks import KeyPath
from piper_simulator.cluster.cluster import Cluster, NodeKind
from piper_simulator.cluster.constants import StackConstant
from piper_simulator.cluster.device import CPU, Device
from piper_simulator.cluster.messages_file import read_messages
from piper_simulator.cluster.named import ALIASES, DEVICES, cpu_local, load_cluster, product_cluster
from piper_simulator.cluster.network import Links, Network, SlowLink
from piper_simulator.cluster.software import with_stack
from piper_simulator.cluster.stacks import (
    GENERATIONS,
    SOFTWARE,
    STACKS,
    Stack,
    holds_for,
    read_software,
    stacks_of,
)
from piper_simulator.contention.demands import Message, demands
from piper_simulator.contention.flows import message_flows, route, wiring
from piper_simulator.durations.checked import model_for, under_load
from piper_simulator.durations.communication import by_formula, rank_group
from piper_simulator.durations.cost_model import (
    CostModel,
    CostModelFactory,
    Work,
    given_only,
    work_of,
)
from piper_simulator.durations.device_model import DeviceModel
from piper_simulator.durations.expert_loads import ExpertLoad, GivenLoad, Zipf, load_of, load_text
from piper_simulator.durations.instances import axes_inside
from piper_simulator.durations.kernels import kernel_seconds, launch_count, step_seconds
from piper_simulator.explanation.causes import Cause
from piper_simulator.explanation.comparison import Comparison, StepDifference, compare
from piper_simulator.explanation.critical import PathPiece
from piper_simulator.explanation.whatif import WhatIf
from piper_simulator.explanation.why import Why, why
from piper_simulator.interval import RunsInterval, interval_share, step_interval
from piper_simulator.memory.device_memory import device_memory, device_type
from piper_simulator.memory.oom import SHOWN, too_much
from piper_simulator.memory.software import software_buffers
from piper_simulator.metrics import repeated_share
from piper_simulator.period import (
    StepParts,
    held_and_reserved,
    period,
    period_and_interval,
    step_parts,
)
from piper_simulator.simulation import Simulation, simulate
from piper_simulator.times.engine import run_engine
from piper_simulator.times.jitter import Distribution
from piper_simulator.times.splitting import split
from piper_simulator.times.timed import issue_of, step_and_period_alone

__all__ = [
    "DEVICES",
    "RunsInterval",
    "SOFTWARE",
    "Stack",
    "StackConstant",
    "StepParts",
    "held_and_reserved",
    "holds_for",
    "period",
    "period_and_interval",
    "read_software",
    "stacks_of",
    "interval_share",
    "step_interval",
    "step_parts",
    "with_stack",
    "work_of",
    "ALIASES",
    "CPU",
    "Cause",
    "Cluster",
    "Comparison",
    "CostModel",
    "CostModelFactory",
    "Device",
    "ExpertLoad",
    "DeviceModel",
    "Distribution",
    "KeyPath",
    "Links",
    "GivenLoad",
    "Message",
    "Network",
    "NodeKind",
    "PathPiece",
    "SHOWN",
    "GENERATIONS",
    "STACKS",
    "Simulation",
    "SlowLink",
    "StepDifference",
    "WhatIf",
    "Why",
    "Work",
    "Zipf",
    "by_formula",
    "compare",
    "cpu_local",
    "demands",
    "device_memory",
    "device_type",
    "given_only",
    "issue_of",
    "kernel_seconds",
    "launch_count",
    "load_cluster",
    "load_of",
    "load_text",
    "message_flows",
    "model_for",
    "product_cluster",
    "rank_group",
    "read_messages",
    "route",
    "axes_inside",
    "repeated_share",
    "run_engine",
    "simulate",
    "software_buffers",
    "split",
    "step_seconds",
    "step_and_period_alone",
    "too_much",
    "under_load",
    "why",
    "wiring",
]
