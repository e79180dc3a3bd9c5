"""Read, check and write schedules as CSV files, in the format of torch.distributed.pipelining.

It may import piper_ir and everything of the compiler except capture.
"""

from piper_compiler.interchange.files import parse_schedule, read_schedule_csv, write_schedule_csv
from piper_compiler.interchange.schedule import Schedule

__all__ = ["Schedule", "parse_schedule", "read_schedule_csv", "write_schedule_csv"]
