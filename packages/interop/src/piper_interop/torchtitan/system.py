"""torchtitan: recipes that are Python functions, read by torchtitan's own parser."""

from __future__ import annotations

from piper_interop.neutral.system import System
from piper_interop.torchtitan.describe import describe
from piper_interop.torchtitan.export import export
from piper_interop.torchtitan.reader import read
from piper_interop.torchtitan.table import STAND_INS, TABLE

SYSTEM = System("torchtitan", read, TABLE, describe, STAND_INS, complete=True, export=export)
