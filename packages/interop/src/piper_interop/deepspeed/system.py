"""Name DeepSpeed's reader, table, description and export."""

from piper_interop.deepspeed.describe import describe
from piper_interop.deepspeed.export import export
from piper_interop.deepspeed.options import STAND_INS
from piper_interop.deepspeed.reader import read
from piper_interop.deepspeed.table import TABLE
from piper_interop.neutral.system import System

SYSTEM = System(
    name="deepspeed",
    read=read,
    table=TABLE,
    describe=describe,
    export=export,
    stand_ins=STAND_INS,
)
