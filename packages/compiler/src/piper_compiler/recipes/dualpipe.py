"""Make DualPipeV and DualPipe: microbatches come from both ends, and forwards are overlapped with backwards."""

from __future__ import annotations

from collections import deque

from piper_compiler.actions import Action, ActionPhase, Orders, Slot
from piper_compiler.directives import Boundaries, Directive
from piper_compiler.recipes.registry import recipe
from piper_compiler.recipes.scheduled import scheduled
from piper_compiler.recipes.stages import check_numbers, first_microbatches, v_stage
from piper_ir.ground.errors import DirectiveError

_Move = tuple[int, ActionPhase, int]
"""A way (0: in at the near end, 1: back from the far end), a phase, and the number of the microbatch on its way."""


@recipe(
    source="DeepSeek-AI 2025, github.com/deepseek-ai/DualPipe",
    formula="bubble (p - 1)(O + B - 3W) on the device with most idle; F = I, W <= F, O >= F + W, m >= 2p",
    peak="2p + 1",
    use="expert parallelism: a forward's communication hides behind a backward's compute, with one copy of the "
    "parameters",
    rule="any pp, microbatches >= 1; 2 chunks per device",
)
def dualpipe_v(*, pp: int, microbatches: int, at: Boundaries = "even") -> tuple[Directive, ...]:
    """Overlap forwards and backwards on a folded half of DualPipe: device r has the stages r and 2p - 1 - r.

    Source: DeepSeek-AI 2025, github.com/deepseek-ai/DualPipe; the order is the one of PyTorch's ScheduleDualPipeV.

    Bubble (p - 1)(O + B - 3W) on the device with most idle, if F = I, W <= F, F + W <= O and m >= 2p (O = F + B if
    pairs gain nothing); then the peak is 2p + 1 activations of a chunk on every device. Any pp and microbatches; fewer
    than 2p are the first ones of 2p.
    """
    check_numbers("dualpipe_v", pp=pp, microbatches=microbatches)
    return scheduled(dualpipe_v_orders(pp, microbatches), microbatches=microbatches, at=at)


def dualpipe_v_orders(pp: int, microbatches: int) -> Orders:
    """Return the orders of DualPipeV; way 1 is the other chunk of the device."""
    whole = max(microbatches, 2 * pp)
    devices = [_both_ways(pp, r, whole) for r in range(pp)]
    orders = [
        [
            tuple(Action(v_stage(pp, r, way), phase, mb) for way, phase, mb in slot)
            for slot in devices[r]
        ]
        for r in range(pp)
    ]
    return first_microbatches(orders, microbatches)


@recipe(
    source="DeepSeek-AI 2024, arXiv 2412.19437",
    formula="bubble (p/2 - 1)(O + B - 3W) on the device with most idle; F = I, W <= F, O >= F + W, m >= 2p and even",
    peak="p + 1",
    use="as DualPipeV, with half as many stages per device and every stage's parameters on two devices",
    rule="pp even; any microbatches >= 1",
)
def dualpipe(*, pp: int, microbatches: int, at: Boundaries = "even") -> tuple[Directive, ...]:
    """Run pipelines in both directions, a forward of one overlapped with a backward of the other.

    Stage s is on device s for even microbatches and on device p - 1 - s for odd ones. Both hold the stage's parameters
    and their gradients are summed. Source: DeepSeek-AI 2024, arXiv 2412.19437.

    Bubble (p/2 - 1)(O + B - 3W) on the device with most idle, if F = I, W <= F, F + W <= O and m >= 2p is even; then
    the peak is p + 1 activations of a stage on every device. Fewer microbatches are the first ones of 2p, an odd number
    is the first ones of one more. Raises DirectiveError for an odd pp: the directions meet between two devices.
    """
    check_numbers("dualpipe", pp=pp, microbatches=microbatches)
    if pp % 2:
        raise DirectiveError(
            f"dualpipe(pp={pp}): its two directions need an even number of devices; use pp={pp + 1}"
        )
    return scheduled(dualpipe_orders(pp, microbatches), microbatches=microbatches, at=at)


def dualpipe_orders(pp: int, microbatches: int) -> Orders:
    """Return the orders of DualPipe: the second half of the devices mirrors the first, with directions exchanged."""
    whole = max(-(-microbatches // 2), pp)
    orders: list[list[Slot]] = []
    for r in range(pp):
        near, mirrored = min(r, pp - 1 - r), int(r >= pp // 2)
        slots: list[Slot] = []
        for slot in _both_ways(pp // 2, near, whole):
            turned = [(way ^ mirrored, phase, k) for way, phase, k in slot]
            slots.append(
                tuple([Action(pp - 1 - r if d else r, phase, 2 * k + d) for d, phase, k in turned])
            )
        orders.append(slots)
    return first_microbatches(orders, microbatches)


def _both_ways(devices: int, r: int, microbatches: int) -> list[tuple[_Move, ...]]:
    """Return the slots of device r (0 at the near end) for `microbatches` >= 2 `devices` on each way."""
    todo, after = _Pieces(), devices - 1 - r
    for _ in range(2 * after):
        todo.forward(0)
    for _ in range(r + 1):
        todo.forward(0)
        todo.forward(1)
    for _ in range(after):
        todo.backward(1, split=True)
        todo.weight()
        todo.forward(1)
    for k in range(microbatches - 2 * devices + r + 1):
        if (
            k == 0 and after == 0
        ):  # at the far end the first pair would start later than its forward alone
            todo.forward(0)
            todo.backward(1)
        else:
            todo.pair(0, 1)
        todo.pair(1, 0)
    for _ in range(after):
        todo.backward(1)
        todo.pair(1, 0)
    for k in range(2 * (r + 1)):  # the second half leaves its weight gradients for the end
        todo.backward(1 - k % 2, split=k >= r + 1)
    for _ in range(after):
        todo.weight()
        todo.backward(0, split=True)
    for _ in range(r + 1):
        todo.weight()
    return todo.slots


class _Pieces:
    """Collect the slots of one device.

    Each way counts its own microbatches; weight gradients run in the order of their input gradients.
    """

    def __init__(self) -> None:
        self.slots: list[tuple[_Move, ...]] = []
        self._forwards, self._backwards = [0, 0], [0, 0]
        self._late: deque[tuple[int, int]] = deque()

    def forward(self, way: int) -> None:
        self.slots.append((self._forward(way),))

    def backward(self, way: int, split: bool = False) -> None:
        k = self._next(self._backwards, way)
        self.slots.append(((way, "I" if split else "B", k),))
        if split:
            self._late.append((way, k))

    def weight(self) -> None:
        way, k = self._late.popleft()
        self.slots.append(((way, "W", k),))

    def pair(self, forward: int, backward: int) -> None:
        self.slots.append(
            (self._forward(forward), (backward, "B", self._next(self._backwards, backward)))
        )

    def _forward(self, way: int) -> _Move:
        return way, "F", self._next(self._forwards, way)

    def _next(self, counts: list[int], way: int) -> int:
        counts[way] += 1
        return counts[way] - 1
