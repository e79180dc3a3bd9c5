"""The communicators that a prediction counts are those that a rank makes."""

from __future__ import annotations

from typing import Any

import pytest

from piper_compiler import Strategy, compile_program, recipes, synthetic
from piper_ir.ground.mesh import Mesh
from piper_ir.plan.plan import Plan
from piper_ir.verify import verify
from piper_runtime.transport.gloo import GlooCommunicators
from piper_simulator import load_cluster
from piper_simulator.memory.device_memory import device_memory

H100 = load_cluster("h100x8")


class Recorded(GlooCommunicators):
    """Record which groups would be made; NCCL's are made at the same places."""

    def group(self, key: str, members: list[int]) -> Any:
        return members


def plan_of(**streams: str) -> Plan:
    """Return two stages whose parameters four ranks each share."""
    program = synthetic(stages=2, F=1, I=1, W=1, params=4096)
    directives = (
        *recipes.one_f_one_b(pp=2, microbatches=2),
        *recipes.data_parallel(zero=2, **streams),
    )
    plan = compile_program(program, Strategy(Mesh(pp=2, dp=4), directives)).plan
    verify(plan)
    return plan


@pytest.mark.parametrize(
    ("streams", "groups"), [({}, 2), ({"gather": "dp", "reduce": "dp"}, 1)], ids=["apart", "shared"]
)
def test_a_channel_has_a_communicator(streams: dict[str, str], groups: int) -> None:
    """Gathers and scatters of a role have two, or one if they share a stream."""
    plan = plan_of(**streams)
    for role in plan.roles:
        for rank in role.ranks:
            communicators = Recorded(None, rank)
            communicators.connect(plan)
            kinds = [key.split()[0] for key in communicators._groups]
            found = device_memory(plan, role, 0, H100.device)
            assert (
                found.groups
                == kinds.count("group") * H100.device.group_bytes
                == groups * H100.device.group_bytes
            )
            assert (
                found.pairs
                == kinds.count("p2p") * H100.device.p2p_bytes
                == 2 * H100.device.p2p_bytes
            )
