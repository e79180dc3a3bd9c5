"""Name Accelerate's reader, table, description and export."""

from piper_interop.accelerate.describe import describe
from piper_interop.accelerate.export import export
from piper_interop.accelerate.reader import read
from piper_interop.accelerate.table import STAND_INS, TABLE
from piper_interop.neutral.system import System

SYSTEM = System(
    name="accelerate",
    read=read,
    table=TABLE,
    describe=describe,
    export=export,
    stand_ins=STAND_INS,
)
