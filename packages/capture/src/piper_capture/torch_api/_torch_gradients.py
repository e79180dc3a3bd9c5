"""Hold the private API of torch that lets Dynamo trace `x.requires_grad_()` in forward without a graph node.

`x.requires_grad = True`, as models of speech have it, is treated alike.

Only `torch.autograd.grad` and `backward` use the gradient of such a tensor, and no graph holds these calls: they run by
autograd in a module of their own, or are refused. So the trace only has to return the new value of `x.requires_grad`
afterwards. Tensors of the model are refused: whether one is trained is decided before the forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch._dynamo.variables import ConstantVariable, builtin
from torch._dynamo.variables.tensor import TensorVariable

from piper_capture.torch_api._torch import in_place

_SETTING: Any = getattr(builtin, "SetAttrBuiltinVariable", None)
"""The class with the trace of setattr; None for an older torch, which refuses `x.requires_grad = True`."""

BATCH = ("L['inputs']", "L['targets']")
"""The prefixes of Dynamo's source names for tensors of the batch."""

REFUSED = {
    "requires_grad_() call": (
        "whether a tensor of the model is trained is changed in forward",
        "It is decided once, before the first step: call requires_grad_(...) in the function that makes the model; "
        "a tensor that is no parameter needs none.",
    ),
    "setattr() on Tensor.requires_grad": (
        "requires_grad is set as an attribute to something else than True",
        "Write x.detach() for a tensor that shall have no gradient. Parameters get it where the model is made.",
    ),
    "creation function with requires_grad=True": (
        "a tensor is made with requires_grad=True",
        "Leave requires_grad=True out, or write .requires_grad_() behind it: torch.zeros(8).requires_grad_().",
    ),
    "Tensor.retain_grad()": (
        "a plan keeps no gradients of activations",
        "Leave retain_grad() out. What forward itself does with gradients comes from torch.autograd.grad(y.sum(), "
        "x, create_graph=True), in a small nn.Module of its own, which runs by autograd as it is.",
    ),
    "Tensor.backward()": (
        "backward() in forward adds to the gradients of parameters, which in a plan is done by W alone",
        "Ask for gradients by torch.autograd.grad(y.sum(), x, create_graph=True) in a small nn.Module of its own, "
        "which then runs by autograd as it is; a further loss is added to the loss of the job.",
    ),
}
"""A part of Dynamo's error text -> (the problem, the way out)."""


@contextmanager
def requires_grad_traced() -> Iterator[None]:
    """Let Dynamo trace requires_grad_() on a tensor of the batch, or on one that forward makes."""
    method = TensorVariable.method_requires_grad_
    setting: Any = getattr(_SETTING, "_call_setattr", None)
    changed: list[Tensor] = []

    def requires_grad_(variable: Any, tx: Any, requires_grad: Any = True) -> Any:
        asked = (
            requires_grad if isinstance(requires_grad, bool) else requires_grad.as_python_constant()
        )
        value = variable.as_proxy().node.meta["example_value"]
        of_model = variable.source is not None and not variable.source.name.startswith(BATCH)
        if asked == value.requires_grad or not asked or of_model:
            return method(variable, tx, requires_grad)
        value.requires_grad_()
        changed.append(value)
        variable.requires_grad = True
        return variable

    def set_attribute(variable: Any, tx: Any, owner: Any, name: Any, value: Any) -> Any:
        asked = value.as_python_constant() if value.is_python_constant() else None
        if owner.is_tensor() and asked is True and name.as_python_constant() == "requires_grad":
            owner.call_method(tx, "requires_grad_", [value], {})
            return ConstantVariable.create(None)
        return setting(variable, tx, owner, name, value)

    try:
        with ExitStack() as changed_here:
            changed_here.enter_context(
                in_place(TensorVariable, {"method_requires_grad_": requires_grad_})
            )
            if setting is not None:
                changed_here.enter_context(in_place(_SETTING, {"_call_setattr": set_attribute}))
            yield
    finally:
        for tensor in changed:  # tensors of the batch, which other traces get too
            tensor.requires_grad_(False)
