"""Hold small helpers that know nothing of plans: texts of numbers and objects, files, interpolation, user code.

One names this machine.

May import: ground.
"""

from piper_ir.tools.brief import Brief
from piper_ir.tools.files import check_writable, write_whole
from piper_ir.tools.frame_stack import room_for_frames
from piper_ir.tools.gc_pause import no_garbage_collection
from piper_ir.tools.interpolate import REACH, Points, log_log, within
from piper_ir.tools.machine import machine_name, usable_cores
from piper_ir.tools.progress import clear_line, shown_while_working, working
from piper_ir.tools.ranges import named_ranks, ranks_text
from piper_ir.tools.ray_reason import ray_reason
from piper_ir.tools.units import count_text, enough_text, flops_text, size_text, time_text
from piper_ir.tools.unread import json_fields, unread, why_unread
from piper_ir.tools.user_calls import PACKAGES, user_code, user_line
from piper_ir.tools.words import names, says

__all__ = [
    "PACKAGES",
    "Brief",
    "REACH",
    "Points",
    "check_writable",
    "clear_line",
    "count_text",
    "enough_text",
    "flops_text",
    "json_fields",
    "log_log",
    "machine_name",
    "named_ranks",
    "no_garbage_collection",
    "ranks_text",
    "ray_reason",
    "room_for_frames",
    "shown_while_working",
    "size_text",
    "time_text",
    "names",
    "says",
    "unread",
    "usable_cores",
    "user_code",
    "user_line",
    "why_unread",
    "within",
    "working",
    "write_whole",
]
