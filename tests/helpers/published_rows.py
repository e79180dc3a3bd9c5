"""Hold the row of a published run that tests change."""

from __future__ import annotations

TINY = {
    "case": "a", "source": "SimuMax, words", "arch": "llama", "hidden": "512", "ffn": "1024", "heads": "8",
    "kv_heads": "4", "layers": "2", "vocab": "1024", "seq": "256", "hw": "b200-sxm", "gpus": "4",
    "gpus_per_node": "4", "tp": "2", "pp": "1", "vpp": "1", "cp": "1", "dp": "2", "zero": "1",
    "micro_batch": "1", "global_batch": "8", "seq_parallel": "yes", "step_s": "0.01", "peak_gib": "0.1",
    "recompute": "none", "tied": "no", "dtype": "bf16",
}  # fmt: skip
