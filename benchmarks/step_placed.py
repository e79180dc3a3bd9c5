"""Have torch's side of a comparison once more, with its ranks placed as our launcher places ours.

torchrun leaves ranks where the system puts them. Here each rank is on a core of its own, by the function that our
launcher uses, and so are the threads that carry its messages. These threads are as torch starts them, or the ones that
read sockets displace no other thread, as the runtime's do (docs/decisions/0032).
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.expert_model import MixtureRegime
from benchmarks.expert_side import TorchMixture
from benchmarks.step_sides import Setup, Side

WAYS = {"threads as torch starts them": False, "threads of sockets as ours": True}
"""Whether threads that read sockets leave others their core, by what a table calls it."""
SOCKETS = "gloo_tcp_loop"
"""The name that gloo gives the thread that reads and writes sockets."""


def placed(setup: Setup, rank: int) -> dict[str, Side]:
    """Return torch's side by way; call it where the rank has its share of the cores. There is none but for experts."""
    if not isinstance(setup.regime, MixtureRegime):
        return {}
    found: dict[str, Side] = {}
    for way, yields in WAYS.items():
        before = _threads()
        found[way] = TorchMixture(
            setup.regime, setup.job.seed, setup.global_batch, rank, own_groups=True
        )
        if yields:
            let_others_run(_threads() - before)
    return found


def let_others_run(threads: set[int]) -> None:
    """Give those of these threads that read sockets the runtime's policy; RuntimeError if there are none."""
    sockets = [
        t
        for t in threads
        if Path(f"/proc/self/task/{t}/comm").read_text(encoding="utf-8").strip() == SOCKETS
    ]
    if not sockets:
        raise RuntimeError(f"torch has started no thread {SOCKETS}: gloo calls it otherwise now")
    for thread in sockets:
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}
