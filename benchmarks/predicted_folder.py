"""Measure `piper simulate --out`: CPU seconds, memory, and the bytes of the folder, for one of the examples.

python -m benchmarks.predicted_folder                                              Llama 3 405B on 16,384 devices
python -m benchmarks.predicted_folder examples/gpt3_175b.py --cluster 'h100x8*128'   any other file and options

It prints one JSON object. `report_cpu_s` is of `piper report` on the folder, which reads everything again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LLAMA = ["examples/llama3_405b.py", "--cluster", "h100x8*2048"]


def _run(*arguments: str) -> dict[str, float]:
    """Run a command of Piper, and return its seconds and its largest memory."""
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "piper", *arguments], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"piper {' '.join(arguments)} failed")
    return {
        "cpu_s": used.ru_utime + used.ru_stime,
        "wall_s": time.monotonic() - begin,
        "peak_gib": used.ru_maxrss / 2**20,
    }


def main() -> None:
    """Measure once."""
    with tempfile.TemporaryDirectory() as out:
        found = _run("simulate", *(sys.argv[1:] or LLAMA), "--out", out)
        (folder,) = Path(out).iterdir()
        sizes = {
            path.name: path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()
        }
        found |= {
            "report_cpu_s": _run("report", str(folder))["cpu_s"],
            "mb": sum(sizes.values()) / 1e6,
        }
    largest = sorted(sizes.items(), key=lambda s: -s[1])[:5]
    numbers = {name: round(value, 2) for name, value in found.items()}
    print(json.dumps(numbers | {"load": os.getloadavg()[0], "largest": dict(largest)}))


if __name__ == "__main__":
    main()
