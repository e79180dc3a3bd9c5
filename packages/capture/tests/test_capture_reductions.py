"""A loss and its reduction are two ops, since torch's kernel leaves all terms in the storage of the result."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from piper_capture.graphs.local_rules import REDUCED
from piper_capture.graphs.rewrites import rewrite_joint
from tests.helpers.cases import each_case

REDUCTIONS = {"mean": 1, "sum": 2}


def traced(
    op: torch._ops.OpOverload, reduction: str, given: tuple[torch.Tensor, torch.Tensor]
) -> fx.GraphModule:
    """A graph with a loss as users call it: the mean is the default."""
    named = {} if reduction == "mean" else {"reduction": REDUCTIONS[reduction]}
    return make_fx(lambda x, y: op(x, y, **named), tracing_mode="fake")(*given)


@each_case("reduction", REDUCTIONS)
@each_case("op", REDUCED, ids=str)
def test_a_reduced_loss_owns_its_own_bytes_alone(op: torch._ops.OpOverload, reduction: str) -> None:
    given = torch.rand(6, 5), torch.rand(6, 5)
    module = traced(op, reduction, given)
    before = module(*given)
    assert before.untyped_storage().nbytes() == 4 * 30, (
        "torch keeps no more than the result: this rewrite can go"
    )
    rewrite_joint(module.graph)
    module.recompile()
    after = module(*given)
    assert torch.equal(after, before) and after.untyped_storage().nbytes() == 4
    sizes = [
        n.meta["val"].untyped_storage().nbytes()
        for n in module.graph.nodes
        if n.op == "call_function"
    ]
    assert sizes == [4 * 30, 4]


def test_terms_that_are_not_reduced_stay_one_op() -> None:
    given = torch.rand(6, 5), torch.rand(6, 5)
    module = make_fx(lambda x, y: torch.ops.aten.mse_loss.default(x, y, 0), tracing_mode="fake")(
        *given
    )
    rewrite_joint(module.graph)
    assert (
        len(module.graph.find_nodes(op="call_function", target=torch.ops.aten.mse_loss.default))
        == 1
    )
    assert len(module.graph.nodes) == 4


@pytest.mark.parametrize("name", ["huber_loss", "binary_cross_entropy_with_logits"])
def test_other_losses_keep_nothing(name: str) -> None:
    made = getattr(torch.ops.aten, name).default(torch.rand(6, 5), torch.rand(6, 5))
    assert made.untyped_storage().nbytes() == 4
