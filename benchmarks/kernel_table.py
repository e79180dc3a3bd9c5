"""Write measured kernels as a cluster file.

They are what `benchmarks/gpu_check.py` and `benchmarks/gpu.py` measured on an H200, as rows that a prediction looks up,
and what one launch cost that machine's host.

python benchmarks/kernel_table.py             writes benchmarks/measured/h200-eager.toml, offline

The launch cost is that of a step that waits for the host (a GPT of width 512): the time in which it was issued, less
what instructions take, by the kernels of its plan. No step is fitted that `benchmarks/formula.py` predicts with the
table.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file, sys.path begins with this folder and not with the root
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.gpu import SMALL, name_of, prepared
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Compute
from piper_simulator import Cluster, launch_count, load_cluster

MEASURED = Path(__file__).parent / "measured"
OUT = MEASURED / "h200-eager.toml"
KERNELS, CEILINGS = MEASURED / "gpu-check-h200.json", MEASURED / "gpu-h200.json"
BASE, STACK = "h200-141g-sxm", "eager"
REPLACED = ("cross-entropy, gradient, 4096 x 32768, bfloat16",)
"""Kernels that Piper does not run any more: that gradient made a softmax, now it begins from the logsumexp."""
CALLS = {
    "attention forward, cuda_cudnn": "attention",
    "attention backward, cuda_cudnn": "attention_dgrad",
}
ATTENTION = 4 * 4 * 16 * 1024 * 1024 * 128 // 2
"""FLOPs of the attention that was measured: causal, 4 x 1024 tokens, 16 heads of 128."""


def rows() -> Iterator[dict[str, Any]]:
    """Return one row per measured kernel, as `piper_simulator.cluster.kernel_table` reads it."""
    check = json.loads(KERNELS.read_text(encoding="utf-8"))
    for row in check["rows"]:
        if row["section"] == "kernel" and row["name"] not in REPLACED:
            seconds = microseconds(row["note"].removesuffix(" us"))
            yield kernel(row["name"]) | {
                "seconds": seconds,
                "source": source(check, "gpu_check.py"),
            }
    for run in json.loads(CEILINGS.read_text(encoding="utf-8"))["runs"]:
        for row in run["rows"]:
            if row["section"] == "ceiling" and (found := ceiling(row)) is not None:
                yield found | {"source": source(run, "gpu.py")}


def microseconds(text: str | float) -> float:
    """Return seconds without digits that were not printed."""
    return float(f"{float(text) / 1e6:.7g}")


def source(run: dict[str, Any], script: str) -> str:
    machine = run["machine"]
    return (
        f"benchmarks/{script} on {machine['device']}, torch {machine['torch']}, "
        f"{machine['date'][:16]} UTC"
    )


def kernel(name: str) -> dict[str, Any]:
    """Return kind, operator and size of a row of `gpu_check.kernels` as plans count them, in bfloat16.

    ValueError for another row.
    """
    if found := re.fullmatch(r"linear, (\d+) x (\d+) -> (\d+), bfloat16", name):
        m, k, n = map(int, found.groups())
        return {"kind": "matmul", "dtype": "bfloat16", "shape": [m, n, k]}
    found = re.fullmatch(r"([a-z, -]+?)(?: of two halves)?, (\d+) x (\d+), bfloat16", name)
    if found is None:
        raise ValueError(f"{KERNELS}: no kernel is known as {name!r}")
    m, n = int(found[2]), int(found[3])
    match found[1]:
        case "cross-entropy" | "cross-entropy, gradient" as loss:
            op = "cross_entropy" + ("_dgrad" if "gradient" in loss else "")
            return {"kind": "loss", "op": op, "dtype": "bfloat16", "shape": [m, n]}
        case (
            "layer norm"
        ):  # x and result, weight and bias, mean and deviation of each row in float32
            return {
                "kind": "norm",
                "op": "layer_norm",
                "dtype": "bfloat16",
                "bytes": 4 * m * n + 4 * n + 8 * m,
            }
        case op:
            tensors = 3 if op == "add" else 2
            return {
                "kind": "elementwise",
                "op": op,
                "dtype": "bfloat16",
                "bytes": 2 * tensors * m * n,
            }


def ceiling(row: dict[str, Any]) -> dict[str, Any] | None:
    """Return the same of a row of `gpu.ceilings`; None for kernels that the device's stack does not run."""
    name, value = row["name"], row["value"]
    if found := re.fullmatch(r"matrix product of (\d+), (\w+)", name):
        n = int(found[1])
        return {
            "kind": "matmul",
            "dtype": found[2],
            "shape": [n, n, n],
            "seconds": float(f"{2e-12 * n**3 / value:.4g}"),
        }
    if name == "copy of 2 GiB, read and written":
        moved = 2 * 2 * 2**30
        seconds = float(f"{moved / value / 1e12:.4g}")
        return {
            "kind": "elementwise",
            "op": "clone",
            "dtype": "bfloat16",
            "bytes": moved,
            "seconds": seconds,
        }
    if name in CALLS:  # causal: a shape would not say so, its FLOPs do
        flops = ATTENTION if CALLS[name] == "attention" else ATTENTION * 5 // 2
        return {
            "kind": "attention",
            "op": CALLS[name],
            "dtype": "bfloat16",
            "flops": flops,
            "seconds": microseconds(value),
        }
    return None


def launched(plan: Plan, cluster: Cluster) -> tuple[int, int]:
    """Return the instructions, and kernels of chunks, in one step of a plan for one device."""
    program = plan.roles[0].program
    ops = [p.op for instr in program for p in instr.parts if isinstance(p.op, Compute)]
    return len(program), sum(
        launch_count(cluster.device, plan.chunk(op.chunk).steps[op.step].cost) for op in ops
    )


def launch_seconds() -> tuple[float, str]:
    """Return the seconds of one kernel launch on that machine's host, and where they come from."""
    title = name_of(SMALL, "bfloat16")
    cluster = load_cluster(f"h200x1@{STACK}")
    for run in json.loads(CEILINGS.read_text(encoding="utf-8"))["runs"]:
        for row in run["rows"]:
            issued = re.search(r"issued after ([\d.]+) \(ours\)", row.get("note", ""))
            if row["name"] == f"{title}: torch/ours" and issued:
                instructions, kernels = launched(prepared(SMALL, "bfloat16").plan, cluster)
                seconds = (
                    float(issued[1]) / 1e3 - instructions * cluster.device.host_issue_s
                ) / kernels
                of = (
                    f"{title}: issued in {issued[1]} ms, {instructions} instructions, {kernels} "
                    f"kernels"
                )
                return float(f"{seconds:.3g}"), f"{of}; {source(run, 'gpu.py')}"
    raise ValueError(
        f"{CEILINGS}: no row {title}: torch/ours that says when the host had issued its step"
    )


def text(launch_s: float, launch_source: str) -> str:
    """Return the cluster file."""
    found = [*rows()]
    lines = [
        "# Measured on one machine, by benchmarks/kernel_table.py; sources in each row. Built-in "
        "clusters do not use "
        "it.",
        'name = "h200-eager"',
        f'stack = "{STACK}"',
        f'notes = "{len(found)} kernels and the launch cost are those of one machine in November '
        f"2026, the rest is "
        f'public"',
        "",
        "[sources]",
        f'launch_s = "{launch_source}"',
        "",
        "[device]",
        f'base = "{BASE}"',
        f"launch_s = {launch_s:g}",
    ]
    for row in found:
        lines += ["", "[[kernel]]", *(f"{k} = {json.dumps(v)}" for k, v in row.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    OUT.write_text(text(*launch_seconds()), encoding="utf-8")
    print(f"{len([*rows()])} kernels in {OUT}")
