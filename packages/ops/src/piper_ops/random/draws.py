"""Draw for this rank's part of the batch the random numbers that one device draws for the whole batch.

The rule, which `piper.api.reference.reference_random` restates for plain PyTorch (docs/random_numbers.md has it for
people):

- A *place* is the path of the module that draws and the number of the draw among the draws of that module in a forward,
  from 0: "layers.3.drop#0". A place and the job's seed and step give a key.
- An element of a drawn tensor gets the number that the key has for the element's index in the tensor of the *whole
  batch*, in row-major order. So neither the rows of a microbatch nor the placement of a layer matter.
- A number is an integer of 32 bits; `UNIFORM` makes a float of it.
- A device that shares an operation has a part of the drawn tensor: it draws the numbers of the elements of its part.

Captured code calls `draw`; opaque code, which autograd runs as it is, runs under `DrawingMode`. Both ask for the
`DrawsOfCall` that the engine has set for the chunk by `drawing`. Without one, torch's own operations and generator
serve.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from piper_ops.random.counter import Key, key_of, numbers, numbers_at
from piper_ops.random.draw_kernels import draw_from_numbers, is_draw

LONG_RUN = 1 << 16
"""The elements from which numbers that follow one another are made run by run; shorter runs are made together."""
UNIFORM = {torch.float64: 24, torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}
"""The leading bits of a number that are a float in [0, 1), by dtype: in float64 as many as in float32."""


ANY_NUMBER = "#*"
"""The end of the place of a module whose number of draws depends on values; only torch's generator can serve these."""


DrawnPart = Sequence[Sequence[tuple[int, int | None, int | None]]]
"""A device's part of a drawn tensor, or nothing for all of it: for each dimension its loops, the outermost first.

A loop has its number of steps, and the step that the device has where the loop around it is at step 0, and elsewhere;
negative ones count from the end, and None says that it has all steps.
"""


def positions(loops: Sequence[tuple[int, int | None, int | None]], device: torch.device) -> Tensor:
    """Return where the entries that a device has of a dimension are in all of it."""
    index = torch.zeros(1, dtype=torch.int64, device=device)
    around = index
    for size, first, other in loops:
        if first is None or other is None:
            steps = torch.arange(size, device=device).expand(len(index), size)
        else:
            own = torch.where(around == 0, first % size, other % size)
            steps = own[:, None]
        index = (index[:, None] * size + steps).flatten()
        around = steps.flatten()
    return index


def _part_of_whole(
    op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], part: DrawnPart
) -> tuple[Tensor, Tensor]:
    """Run a dropout on a device's part, by the mask that torch's own operation draws for the whole tensor."""
    x, p, *rest = args
    whole = x.new_ones([math.prod(size for size, *_ in loops) for loops in part])
    kept = op(whole, p, *rest, **kwargs)[1]
    for dim, loops in enumerate(part):
        kept = kept.index_select(dim, positions(loops, x.device))
    return x.mul(kept).mul_(0.0 if p == 1 else 1.0 / (1.0 - p)), kept


class DrawPlace(Protocol):
    """Describe a draw of a chunk: its place, and how many entries a row has in each dimension of the drawn tensor."""

    @property
    def place(self) -> str: ...
    @property
    def rows(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class DrawsOfCall:
    """Hold everything that determines the random numbers of one run of a chunk.

    Attributes:
        draws: the draws of the chunk, in the order in which its code numbers them.
        seed: the job's.
        step: of the optimizer, from 0.
        first: the first row of the microbatch in the global batch.
        whole: rows of the global batch.
        begin: is called with the text of a place before torch's own operation draws; None if numbers are counted.
        key: returns the key of a place, with the number of its stream behind it; None to make it of seed and step.
    """

    draws: Sequence[DrawPlace]
    seed: int
    step: int
    first: int
    whole: int
    begin: Callable[[str], object] | None = None
    key: Callable[[str], Key] | None = None

    def run(
        self,
        number: int,
        op: OpOverload,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        part: DrawnPart = (),
    ) -> Any:
        """Run a random operation, the one of that number in the chunk, on a device's part of its tensor."""
        drawn = self.draws[number]
        if self.begin is not None:
            self.begin(drawn.place)
            return _part_of_whole(op, args, kwargs, part) if part else op(*args, **kwargs)
        numbers = DrawnNumbers(self, drawn, part)
        return (
            _seen(op, args, kwargs, numbers)
            if _watchers()
            else draw_from_numbers(op, args, kwargs, numbers)
        )


_watchers: Callable[[], int] = torch._C._len_torch_dispatch_stack


def _seen(
    op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], numbers: DrawnNumbers
) -> Any:
    """Run a random operation under a mode that is to see torch's operation, and nothing inside of it."""
    result = op(*args, **kwargs)
    with _disable_current_modes():
        drawn = draw_from_numbers(op, args, kwargs, numbers)
        for into, source in zip(
            *((r if isinstance(r, tuple) else (r,)) for r in (result, drawn)), strict=True
        ):
            if into is not source:
                into.copy_(source)
    return result


class DrawnNumbers:
    """Give the numbers of one draw."""

    def __init__(self, drawing: DrawsOfCall, drawn: DrawPlace, part: DrawnPart = ()) -> None:
        self._drawing, self._drawn, self._part = drawing, drawn, part

    def _key(self, stream: int) -> Key:
        place = f"{self._drawn.place}/{stream}" if stream else self._drawn.place
        if self._drawing.key is not None:
            return self._drawing.key(place)
        return key_of(f"{self._drawing.seed}/{self._drawing.step}/{place}")

    def _begin(self, shape: Sequence[int]) -> int | None:
        """Return the first element's index in the whole batch's tensor; None if the part is not contiguous there."""
        if self._part:
            return None
        rows = [d for d, entries in enumerate(self._drawn.rows) if entries]
        if not rows:
            return 0
        if math.prod(shape[: rows[0]]) != 1 or len(rows) > 1:
            return None
        return self._drawing.first * self._drawn.rows[rows[0]] * math.prod(shape[rows[0] + 1 :])

    def _elements(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return each element's index in the whole batch's tensor."""
        index, stride = torch.zeros((), dtype=torch.int64, device=device), 1
        for dim in reversed(range(len(shape))):
            entries = self._drawn.rows[dim]
            loops = self._part[dim] if self._part else ((shape[dim], None, None),)
            along = (positions(loops, device) + entries * self._drawing.first) * stride
            index = index + along.view(-1, *[1] * (len(shape) - dim - 1))
            stride *= entries * self._drawing.whole or math.prod(size for size, *_ in loops)
        return index

    def _inner(self, shape: Sequence[int]) -> int:
        """Return the number of last dimensions of which this part has all, without rows of others."""
        inner = 0
        for dim in reversed(range(len(shape))):
            if self._drawn.rows[dim] or (self._part and _parted(self._part[dim])):
                break
            inner += 1
        return inner

    def _parts(
        self, key: Key, shape: Sequence[int], device: torch.device
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield the numbers of a tensor, in row-major order, as parts (torch.int32) with their places."""
        begin = self._begin(shape)
        if begin is not None:
            yield from numbers(key, begin, math.prod(shape), device)
            return
        outer = len(shape) - self._inner(shape)
        run = math.prod(shape[outer:])
        # The host reads the starts of long runs.
        where = torch.device("cpu") if run >= LONG_RUN else device
        starts = self._elements(shape[:outer], where).flatten() * run
        if run >= LONG_RUN:
            for k, start in enumerate(starts.tolist()):
                for place, part in numbers(key, start, run, device):
                    yield slice(k * run + place.start, k * run + place.stop), part
            return
        along, group = torch.arange(run, device=device), max(1, LONG_RUN // run)
        for k in range(0, len(starts), group):
            elements = (starts[k : k + group, None] + along).flatten()
            yield slice(k * run, k * run + len(elements)), numbers_at(key, elements)

    def made(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        make: Callable[[Tensor], Tensor],
        stream: int = 0,
    ) -> Tensor:
        """Return a contiguous tensor that `make` computes of the numbers (torch.int32); streams are independent."""
        flat = torch.empty(math.prod(shape), dtype=dtype, device=device)
        for place, part in self._parts(self._key(stream), shape, device):
            flat[place] = make(part)
        return flat.view(tuple(shape))

    def below(self, shape: Sequence[int], chance: float, device: torch.device) -> Tensor:
        """Return bools that are true with the probability `chance`."""
        bound = int(chance * 2.0**32) - 2**31
        if not -(2**31) < bound < 2**31:
            return torch.full(tuple(shape), chance >= 0.5, dtype=torch.bool, device=device)
        return self.made(shape, torch.bool, device, lambda part: part < bound)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return floats in [0, 1), of the leading bits that the dtype holds."""
        bits = UNIFORM[dtype]
        return self.made(
            shape,
            dtype,
            device,
            lambda part: ((part >> (32 - bits)) + 2 ** (bits - 1)).to(dtype) * 2.0**-bits,
        )

    def open(self, shape: Sequence[int], device: torch.device, stream: int = 0) -> Tensor:
        """Return floats (float64) in (0, 1), of all 32 bits."""
        return self.made(
            shape,
            torch.float64,
            device,
            lambda part: (part.double() + (2.0**31 + 0.5)) * 2.0**-32,
            stream,
        )

    def normal(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return normally distributed floats (float64), by Box and Muller from two numbers each."""
        radius = self.open(shape, device).log_().mul_(-2.0).sqrt_()
        return radius.mul_(self.open(shape, device, 1).mul_(2.0 * math.pi).cos_())

    def integers(self, shape: Sequence[int], low: int, high: int, device: torch.device) -> Tensor:
        """Return integers in [low, high), each the remainder of 63 bits from two numbers."""
        upper, lower = (
            self.made(shape, torch.int64, device, lambda part: part.long() + 2**31, stream)
            for stream in (0, 1)
        )
        return (
            upper.bitwise_left_shift_(31)
            .add_(lower.bitwise_right_shift_(1))
            .remainder_(high - low)
            .add_(low)
        )


def _parted(loops: Sequence[tuple[int, int | None, int | None]]) -> bool:
    """Return whether a device has a part of the steps of some loop."""
    return any(first is not None for _, first, _ in loops)


class _Local(threading.local):
    drawing: DrawsOfCall | None = None


_CURRENT = _Local()
"""The drawing of the chunk that runs in this thread."""


@contextmanager
def drawing(current: DrawsOfCall, *, opaque: bool = False) -> Iterator[None]:
    """Let a chunk draw as `current` says; `opaque` is one that autograd runs as it is."""
    before, _CURRENT.drawing = _CURRENT.drawing, current
    unknown = next((d.place for d in current.draws if d.place.endswith(ANY_NUMBER)), "")
    if unknown and current.begin is not None:
        current.begin(unknown)  # once for all draws of the chunk, since nobody knows their number
    try:
        with DrawingMode(current) if opaque and not unknown else nullcontext():
            yield
    finally:
        _CURRENT.drawing = before


def draw(number: int, op: OpOverload, *args: Any, part: DrawnPart = (), **kwargs: Any) -> Any:
    """Run a random operation of captured code, the one of that number in its chunk, or a device's part of it."""
    current = _CURRENT.drawing
    if current is None:
        return op(*args, **kwargs)
    return current.run(number, op, args, kwargs, part)


class DrawingMode(TorchDispatchMode):
    """Let random operations draw as a chunk's drawing says, in the order in which they run."""

    supports_higher_order_operators = True

    def __init__(self, current: DrawsOfCall) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types there
        self._drawing, self._number = current, 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return that code under this mode may call torch.compile, as flex_attention does."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_draw(func, args, kwargs):
            return func(*args, **kwargs)
        self._number += 1
        return self._drawing.run(self._number - 1, func, args, kwargs)
