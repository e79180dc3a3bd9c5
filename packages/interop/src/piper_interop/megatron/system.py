"""Join the parts of Megatron-LM's folder."""

from __future__ import annotations

from piper_interop.megatron.describe import describe
from piper_interop.megatron.export import export
from piper_interop.megatron.reader import read
from piper_interop.megatron.table import STAND_INS, TABLE
from piper_interop.neutral.system import System

SYSTEM = System(
    name="megatron",
    read=read,
    table=TABLE,
    describe=describe,
    export=export,
    stand_ins=STAND_INS,
    complete=True,
)
