"""Say of a model's auxiliary gradients why a batch may not be divided."""

from __future__ import annotations

from typing import TYPE_CHECKING

from piper_ir.ground.errors import CompileError

if TYPE_CHECKING:
    from piper_capture import Captured

IN_THE_LOSS = (
    "Add the auxiliary loss to the loss of the job instead (let the model return it, and Job.loss take it from the "
    "output), or use one microbatch on one replica"
)


def check_unscaled(captured: Captured) -> None:
    """Raise CompileError for a scaled loss beside a backward that is not linear in the gradient that comes in.

    The gradient that such a backward adds is not scaled, and would be divided by the scale with all others.
    """
    for one in captured.auxiliary:
        raise CompileError(
            f"{one.line}: the backward is not linear in the gradient that comes in, so that a scaled loss "
            f"(Precision(loss_scale=...)) trains something else: what it adds is not scaled. Leave the scale out "
            f'(compute="bfloat16" needs none), or add the auxiliary loss to the loss of the job'
        )


def undivided(captured: Captured) -> str:
    """Return why a step may have one microbatch on one replica only; "" if it may have any number.

    A backward that is not linear in the gradient that comes in trains something else in parts, unless the gradient that
    it adds is a sum or a mean over rows.
    """
    wrong = next((one for one in captured.auxiliary if not one.trained), None)
    if wrong is None:
        return ""
    said = (
        f"{wrong.line}: the backward is not linear in the gradient that comes in (a torch.autograd.Function, a "
        f"hook or an operator that adds a gradient of its own, or bounds one)"
    )
    if wrong.kind == "mean":
        return (
            f"{said}. What it adds is a mean over the rows of a microbatch, while gradients are divided by the "
            f"weight of a loss (sum, weight), or beside others that are sums. Multiply it by the rows, so that it "
            f"is a sum over them, or let the loss be a mean. {IN_THE_LOSS}"
        )
    if wrong.kind == "sum":
        return (
            f"{said}. What it adds is a sum over rows, while others of the model are means over them: make all of "
            f"them sums, or means. {IN_THE_LOSS}"
        )
    return (
        f"{said}, and its parts do not tell what the whole batch gives: what it adds is neither a sum over rows "
        f"nor a mean over all of them, or has been made in another chunk, or the chunk is too large to be tried. "
        f"{IN_THE_LOSS}"
    )
