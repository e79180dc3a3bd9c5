"""Piper's simulator: predicts time and memory of a plan on a cluster, without a GPU and without PyTorch."""

from piper_simulator.cluster import Cluster, Kind
from piper_simulator.clusters import cpu_local, load_cluster, product_cluster
from piper_simulator.comparison import Comparison, Difference, compare
from piper_simulator.cost_model import CostModel, CostModelFactory, Work, given_only, model_for
from piper_simulator.critical import Piece
from piper_simulator.device import CPU, Device
from piper_simulator.device_memory import device_memory, device_type
from piper_simulator.explanation import Why, why
from piper_simulator.jitter import Distribution
from piper_simulator.model import DeviceModel
from piper_simulator.network import Links, Network, SlowLink
from piper_simulator.oom import SHOWN, too_much
from piper_simulator.owners import Owner
from piper_simulator.simulation import Simulation, simulate
from piper_simulator.splitting import split
from piper_simulator.whatif import WhatIf

__all__ = [
    "CPU",
    "Cluster",
    "Comparison",
    "CostModel",
    "CostModelFactory",
    "Device",
    "DeviceModel",
    "Difference",
    "Distribution",
    "Kind",
    "Links",
    "Network",
    "Owner",
    "Piece",
    "SHOWN",
    "Simulation",
    "SlowLink",
    "WhatIf",
    "Why",
    "Work",
    "compare",
    "cpu_local",
    "device_memory",
    "device_type",
    "given_only",
    "load_cluster",
    "model_for",
    "product_cluster",
    "simulate",
    "split",
    "too_much",
    "why",
]
