"""Carry tensors between ranks, over gloo, NCCL, or gloo with copies through the host.

May import: rank, engine.
"""

from piper_runtime.transport.gloo import GlooCommunicators
from piper_runtime.transport.transport import SHARED_DEVICE

__all__ = [
    "GlooCommunicators",
    "SHARED_DEVICE",
]
