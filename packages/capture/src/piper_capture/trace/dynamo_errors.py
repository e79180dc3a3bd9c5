"""Turn Dynamo's errors into CaptureErrors: the user's line, the fault in one sentence, and the way out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from traceback import FrameSummary

from torch import Tensor

from piper_capture.module.model import DEVICES, names_device
from piper_capture.torch_api import _torch
from piper_capture.torch_api._torch_blocks import NESTED
from piper_capture.torch_api._torch_gradients import REFUSED
from piper_capture.torch_api.replacements import WAY_OUT
from piper_capture.values.casts import CASTS
from piper_ir.ground.errors import CaptureError
from piper_ops import is_model_code

FAILED = re.compile(
    r"fake tensors: \w+ (?:<[\w\- ]*?(\w+)(?: at 0x\w+)?>|([\w.]+))\(.*: got "
    r"(\w+)\((['\"])(.*)\4\)",
    re.DOTALL,
)
"""A pattern for Dynamo's text of a failing operator: the function or method, then class and text of the error."""

DTYPES_DIFFER = re.compile(
    r"same dtype|same data ?type|to match query|expected scalar type|but got: "
    r"\w*(Float|BFloat16|Double)"
)
"""A pattern for torch's errors for an operator whose tensors have different floating-point dtypes."""
CUSTOM_OP = (
    "A custom op needs an implementation of its shapes and a gradient:\n    @my_op.register_fake\n    def _(x): "
    "return torch.empty_like(x)\n    my_op.register_autograd(backward, setup_context=setup_context)"
)
ONE_GRAPH = (
    "Model and loss must be one graph, without Python side effects and without values read from tensors. A custom "
    "kernel must be registered: @torch.library.custom_op('ns::name', mutates_args=()), register_fake, "
    "register_autograd."
)
LOSS = (
    "A loss is called as loss(output, targets); for a model that computes its loss itself, take it from the "
    "output: `lambda out, _: out.loss`."
)
PYTHON_RANDOM = re.compile(
    r"\bRandom\.\w+|Dynamo does not know how to trace .*\brandom\b|torch\._numpy\.random"
)
"""A pattern for Dynamo's text about a call of Python's module `random`, or of numpy's."""
NUMBERS_OF_PYTHON = "Python or numpy draws a random number, for which a graph has no place"
RANDOM = (
    "Draw it with torch (torch.rand(())), and choose by torch.where; or branch on it in a small nn.Module of its "
    "own, which then runs by autograd as it is."
)
VALUES_OF_LOSS = (
    "Values are there in a run alone. Make a mask once for all tensors that it selects from: x[mask] has as many rows "
    "as y[mask] then."
)
NESTED_BATCHES = (
    "nn.TransformerEncoder in eval mode without gradients gives 0 at padding if src_key_padding_mask leaves out "
    "the end of each row, and else what its layers compute there, so that the result depends on values of the mask",
    "Make it with enable_nested_tensor=False, or put a loss on tokens that are no padding and call it in training "
    "mode with dropout=0.",
)
"""The reason and the way out for an encoder that may take nested tensors."""
OBSERVERS = (
    "modules of torch.ao.quantization keep ranges of values from call to call, and Dynamo does not trace them",
    "Quantize in a small nn.Module of your own, by torch.fake_quantize_per_tensor_affine or per_channel_affine "
    "with a scale that is fixed or comes from the tensor: it then runs by autograd as it is (`piper explain` says "
    "so).",
)
"""The reason and the way out for FakeQuantize and observers."""
RAISED = re.compile(r"raised exception (.{1,300})")
"""A pattern for Dynamo's text about an exception: its class and arguments."""
SEES_IT_RAISE = "Dynamo, which traces this line, sees it raise"
"""The beginning of the reason for a line that raises an exception under Dynamo."""
OTHERWISE = (
    "Where they do, Dynamo runs this line otherwise than Python does: say it with less of Python, such as a plain "
    "dict, an attribute that is set in the constructor, or an operation of torch."
)
"""The way out if a line raises an exception under Dynamo, but not in Python."""
SPARSE = (
    "a sparse tensor is made, and a plan has dense ones alone",
    "Multiply by a dense matrix (register_buffer), or add by index: torch.zeros_like(x).index_add(1, to, x[:, of] "
    "* weight).",
)
"""The reason and the way out for sparse tensors."""
BLOCK_MASK = (
    "a block mask is made in forward",
    "Make it once, by create_block_mask in the constructor of the model or outside of it: what it attends to is a "
    "constant.",
)
"""The reason and the way out for masks of FlexAttention."""

FOLLOWS_VALUES = re.compile(
    r"[Dd]ata[- ]dependent|unbacked symint|[Cc]ould not (guard|extract)|Dynamic shape "
    r"operator|`torch\.autograd\.grad`"
)
"""A pattern for Dynamo's text about code that depends on values of tensors, or asks for gradients."""


CAUSES = {
    "branching": "a branch depends on values of tensors",
    "Dynamic shape operator": "what an operator makes inside depends on values of tensors",
    "torch.autograd.grad": "it asks for gradients in forward",
}
"""A part of Dynamo's text -> the cause for which a module runs as it is written."""


CHOSEN = "Compute both ways and choose by torch.where."
"""The way out for a branch."""
DRAWN = (
    "A layer that is left out at random is computed and multiplied: x = x + (torch.rand(()) >= p) * layer(x). Its "
    "parameters then get gradients of zeros."
)
"""The way out for a branch on a random number."""


def follows_values(error: BaseException) -> bool:
    """Return whether the code that Dynamo could not trace depends on values of tensors."""
    return FOLLOWS_VALUES.search(str(error)) is not None and "fake impl" not in str(error)


def cause_of(reason: str) -> str:
    """Return why a module must run as it is written, from the reason of a refusal."""
    for sign, cause in CAUSES.items():
        if sign in reason:
            return cause
    return reason.partition("\n")[0]


def as_capture_error(
    error: BaseException, step_file: str, batch: Mapping[str, Tensor]
) -> CaptureError:
    """Return Dynamo's error as a CaptureError.

    Args:
        step_file: the file in which model and loss are called.
        batch: the tensors of the batch.
    """
    frames = _torch.user_frames(error)
    own = [f for f in frames if is_model_code(f.filename)]
    part = _part(frames, step_file)
    where = (
        f"{own[-1].filename}:{own[-1].lineno} ({own[-1].line})" if own else part and f"the {part}"
    )
    text, reason = str(error), _reason(error)
    if "fake impl" in text:
        advice = CUSTOM_OP
    elif refusal := _refused(text, reason, frames) or _follows_values(text, reason, part, where):
        reason, advice = refusal
    else:
        advice = _advice(error, reason, part, batch)
    return CaptureError(f"{where}{': ' if where else ''}cannot be captured: {reason}\n{advice}")


def _reason(error: BaseException) -> str:
    """Return Dynamo's words for code that it cannot trace, without its hints; for an operator that fails, torch's."""
    text = str(error)
    lines = text.partition("from user code:")[0].partition("\n\n")[0].splitlines()
    reason = " ".join(
        line.strip()
        for line in lines
        if not line.strip().startswith(("Hint:", "Developer debug context"))
    )
    if reason.startswith("Observed exception"):
        seen = RAISED.search(text)
        return f"{SEES_IT_RAISE} {seen[1] if seen else 'an exception'}"
    failed = FAILED.search(reason) if isinstance(error, _torch.RuntimeFailure) else None
    if failed is None:
        return reason
    return (
        f"{failed[1] or failed[2]} fails: {re.sub(r's[0-9]+(: hint = [0-9]+)?', 'rows', failed[5])}"
    )


def _refused(text: str, reason: str, frames: Sequence[FrameSummary]) -> tuple[str, str] | None:
    """Return the reason and the way out for a part of torch that has no place in a plan; None for other code."""
    if "FakeQuant" in reason or (
        "marked as skipped" in reason and any("quantization" in f.filename for f in frames)
    ):
        return OBSERVERS
    if "sparse" in reason:
        return SPARSE
    if NESTED in text:
        return NESTED_BATCHES
    if refused := next((said for sign, said in REFUSED.items() if sign in reason), None):
        return refused
    masks = any("flex_attention" in f.filename and f.name == "create_block_mask" for f in frames)
    return BLOCK_MASK if masks else None


def _follows_values(text: str, reason: str, part: str, where: str) -> tuple[str, str] | None:
    """Return the reason and the way out for code that follows values or Python's random numbers, else None."""
    if "data-dependent" in text and "branching" not in reason:
        said = VALUES_OF_LOSS if part == "loss" else WAY_OUT
        return "how often it runs, or a size, depends on values of tensors", said
    if "branching" in reason:
        return CAUSES["branching"], DRAWN if where and "rand" in where else CHOSEN
    return (NUMBERS_OF_PYTHON, RANDOM) if PYTHON_RANDOM.search(text) else None


def _advice(error: BaseException, reason: str, part: str, batch: Mapping[str, Tensor]) -> str:
    """Return the way out for code that fails, or that is no graph, for a reason in Dynamo's own words."""
    text, raised = str(error), reason.startswith(SEES_IT_RAISE)
    if names_device(text):
        return f"{DEVICES}."
    if DTYPES_DIFFER.search(reason):
        return CASTS
    if part == "loss" and (
        raised or "bind arguments" in text or "object has no attribute" in reason
    ):
        return LOSS
    if isinstance(error, _torch.RuntimeFailure) or raised:
        advice = f"The batch has {_shapes(batch)}. Check that the model and the loss run on such a batch without Piper."
        return f"{advice} {OTHERWISE}" if raised else advice
    return ONE_GRAPH


def _part(frames: Sequence[FrameSummary], step_file: str) -> str:
    """Return the part that was traced, "model", "loss" or "metric"; "" if it is not known."""
    ours = [f.line or "" for f in frames if f.filename == step_file]
    if not ours:
        return ""
    return "metric" if "measured(" in ours[-1] else "loss" if "loss(" in ours[-1] else "model"


def _shapes(batch: Mapping[str, Tensor]) -> str:
    return ", ".join(
        f"{name} [{', '.join(['rows', *map(str, t.shape[1:])])}]" for name, t in batch.items()
    )


def unknown_tensor(line: str, name: str, tensor: Tensor) -> CaptureError:
    """Return the error for a tensor that a line reads and that is not in the model or the batch."""
    if name.startswith("random_value"):  # Dynamo's name for a number from Python's `random`
        return CaptureError(f"{line}: {NUMBERS_OF_PYTHON}. {RANDOM}")
    return CaptureError(
        f"{line}: the model uses a tensor of shape {tuple(tensor.shape)} ({name}) that is neither a parameter, a "
        f"buffer nor part of the batch; register it with register_buffer"
    )
