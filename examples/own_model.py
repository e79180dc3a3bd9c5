"""A cost model of one's own: every device computes at one rate and every message moves at one, whatever the cluster.

python examples/own_model.py compares its prediction with Piper's formulas
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import piper
from piper_ir.plan.plan import Instr, Plan, RolePlan
from piper_ir.plan.plan_bytes import PlanBytes
from piper_ir.program.ops import Collective, Compute, Recv, Send

FLOPS_PER_S, BYTES_PER_S = 1e12, 25e9


class ConstantRates(piper.CostModel):
    """What takes no FLOPs and sends nothing takes no time."""

    uniform = True  # an instruction takes as long wherever it stands, so that a search may ask once for each
    bounds_steps = True  # it takes as long as its steps do, so that a search may ask for steps before there is a plan

    def __init__(
        self, plan: Plan, cluster: piper.Cluster | None, costs: piper.Costs | None
    ) -> None:
        self.plan, self.traffic = plan, PlanBytes(plan)

    def work(self, role: RolePlan, instr: Instr) -> piper.Work:
        if instr.comm:
            part = instr.parts[0]
            assert isinstance(part.op, Send | Recv | Collective)
            nbytes = self.traffic.message_bytes(part.op, part)
            return piper.Work(nbytes / BYTES_PER_S, "formula", bytes=nbytes)
        steps = [part.op for part in instr.parts if isinstance(part.op, Compute)]
        # a part is one step: B is a part for I and one for W
        flops = sum(
            self.plan.chunk(op.chunk).steps[op.step].cost.flops for op in steps if op.step != "B"
        )
        return piper.Work(flops / FLOPS_PER_S, "formula", flops=flops)


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))[rows.start : rows.stop]
    return x, x.roll(1, dims=1)


def model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


job = piper.Job(model, batch, nn.functional.mse_loss, sgd, global_batch=16)
strategy = piper.Strategy(piper.Mesh(dp=2), piper.recipes.data_parallel())

if __name__ == "__main__":
    plan = piper.compile(job, strategy).plan
    own, ours = piper.simulate(plan, "h100x2", model=ConstantRates), piper.simulate(plan, "h100x2")
    print(
        f"a step takes {own.step_s * 1e6:.1f} us at constant rates, {ours.step_s * 1e6:.1f} us by Piper's formulas"
    )
