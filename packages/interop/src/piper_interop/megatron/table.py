"""Give the verdict on every option of Megatron-LM: rows by name or pattern, in three parts.

The names are of commit d98e8a64, August 2026; older spellings that its parser still takes have rows, too.
"""

from __future__ import annotations

from piper_interop.megatron.names import NAMES
from piper_interop.megatron.table_aside import ASIDE
from piper_interop.megatron.table_model import MODEL
from piper_interop.megatron.table_strategy import STRATEGY
from piper_interop.neutral.options import OptionTable, spelled

TABLE: OptionTable = spelled({**ASIDE, **MODEL, **STRATEGY}, NAMES)

STAND_INS = {
    "bf16": "fp8 of a recipe that is not here, and fp4, are taken as bfloat16",
    "etp": "experts are cut by tp like everything else, over fewer devices",
    "ring": "keys of all context devices go round one ring, without levels",
    "adam": "the optimizer is AdamW",
    "no-offload": "nothing is moved to the host",
}
"""The names that --as accepts, with the words about each."""
