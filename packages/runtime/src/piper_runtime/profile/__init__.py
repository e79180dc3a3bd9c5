"""Measure on real ranks the costs of a program's pieces: compute, messages, memory and the host.

May import: rank, engine, transport.
"""

from piper_runtime.profile.host_costs import host_seconds
from piper_runtime.profile.measure_messages import MessageSample
from piper_runtime.profile.profiler import ProfileReport, ProfileRequest
from piper_runtime.profile.resident import most_on_device, reset_most_on_device

__all__ = [
    "MessageSample",
    "ProfileReport",
    "ProfileRequest",
    "host_seconds",
    "most_on_device",
    "reset_most_on_device",
]
