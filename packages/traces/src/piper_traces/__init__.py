"""Read traces of PyTorch's profiler (Kineto), of any system, and hold them beside a plan.

A trace is read as events (`kineto`), cut into steps and counted by kind (`breakdown`), compared between ranks
(`stragglers`), and matched to the instructions of a plan (`matching`), whose durations then become costs (`costs`).
"""

from piper_traces.breakdown import Breakdown, LaunchGaps, Traffic, breakdown
from piper_traces.costs import measured_costs
from piper_traces.events import DeviceEvent, HostEvent, RankEvents, SentMessage
from piper_traces.kineto import read_events, read_ranks
from piper_traces.matching import Matched, MatchedMessages, match_messages, match_ranges
from piper_traces.stragglers import Straggling, stragglers

__all__ = [
    "Breakdown",
    "DeviceEvent",
    "HostEvent",
    "LaunchGaps",
    "Matched",
    "MatchedMessages",
    "RankEvents",
    "SentMessage",
    "Straggling",
    "Traffic",
    "breakdown",
    "match_messages",
    "match_ranges",
    "measured_costs",
    "read_events",
    "read_ranks",
    "stragglers",
]
