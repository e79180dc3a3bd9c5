"""Draw random numbers in plain PyTorch by the rule of docs/random_numbers.md, which is restated here.

A mode of torch stands below autograd and computes each operation that draws. Its place is the module that runs, as the
modules' own forwards say, and the number of the draw among that module's. This shares no code with Piper.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_ALL = 2**64 - 1
_BITS = {torch.bfloat16: 8, torch.float16: 11}


class _Position(NamedTuple):
    """Say where a forward is: the module that runs, and how often each has drawn."""

    module: str
    drawn: Mapping[str, int]


class RandomState:
    """Give a model the numbers of Job.draws: by row of the batch, or torch's own for each microbatch and place.

    The seed that torch's generator has is the number of the position in a forward. So a layer that runs again in the
    backward, under torch.utils.checkpoint, begins where it was, and draws the same numbers as before.
    """

    def __init__(self, model: nn.Module, seed: int, draws: str = "rows"):
        self._names = {module: name for name, module in model.named_modules()}
        self._seed, self._by_row = seed, draws == "rows"
        self._step, self._rows = 0, range(0)
        self._positions: list[_Position] = []

    @contextmanager
    def during(self, step: int, rows: range) -> Iterator[None]:
        """Draw for these rows of the global batch inside of the block: in one forward, and in its backward.

        If the rows are not the first ones, the first dimension of a random tensor is taken for theirs if it has equally
        many entries for each.
        """
        self._step, self._rows, self._positions = step, rows, []
        self._move("", {})
        own = [(module, vars(module).get("forward")) for module in self._names]
        for module, name in self._names.items():
            module.forward = self._within(name, module.forward)
        try:
            with _Mode(self._drawn):
                yield
        finally:
            for module, forward in own:
                del module.forward
                if forward is not None:
                    module.forward = forward

    def _within(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            before = self._at()
            self._move(name, before.drawn)
            try:
                return forward(*args, **kwargs)
            finally:
                self._move(before.module, self._at().drawn)

        return run

    def _at(self) -> _Position:
        return self._positions[torch.initial_seed()]

    def _move(self, module: str, drawn: Mapping[str, int]) -> None:
        self._positions.append(_Position(module, drawn))
        torch.default_generator.manual_seed(
            len(self._positions) - 1
        )  # torch.manual_seed: 50 times as long

    def _drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a random operation in this position, and go on to the next."""
        module, drawn = self._at()
        place = f"{module}#{drawn.get(module, 0)}"
        if self._by_row:
            result = _by_row(func, args, kwargs, functools.partial(self._numbers, place))
        else:
            text = f"{self._seed}/{self._step}/{self._rows.start}/{place}"
            digest = blake2b(text.encode(), digest_size=8).digest()
            torch.default_generator.manual_seed(int.from_bytes(digest, "big") >> 1)
            result = func(*args, **kwargs)
        self._move(module, {**drawn, module: drawn.get(module, 0) + 1})
        return result

    def _numbers(self, place: str, shape: torch.Size, stream: int = 0) -> Tensor:
        """Return the numbers of a tensor's elements: integers of 32 bits, the two halves of words of SplitMix64."""
        key = f"{self._seed}/{self._step}/{place}" + (f"/{stream}" if stream else "")
        digest = blake2b(key.encode(), digest_size=16).digest()
        start, step = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little") | 1
        if (step ^ (step >> 1)).bit_count() < 24:
            step ^= 0xAAAAAAAAAAAAAAAA
        rows, count = len(self._rows), shape.numel()
        first = self._rows.start * (count // rows) if shape and shape[0] % rows == 0 else 0
        element = torch.arange(first, first + count)
        word = (element >> 1) * _signed(step) + _signed(start)
        word = (word ^ _shifted(word, 30)) * _signed(0xBF58476D1CE4E5B9)
        word = (word ^ _shifted(word, 27)) * _signed(0x94D049BB133111EB)
        word = word ^ _shifted(word, 31)
        half = torch.where(element % 2 == 0, word, word >> 32) & 0xFFFFFFFF
        return (half ^ 2**31).view(
            shape
        )  # a half is a signed integer, and counted from the least one


def _signed(word: int) -> int:
    word &= _ALL
    return word - 2**64 if word >= 2**63 else word


def _shifted(word: Tensor, by: int) -> Tensor:
    return (word >> by) & (_ALL >> by)


class _Mode(TorchDispatchMode):
    """Hand operations that draw random numbers to a function."""

    supports_higher_order_operators = True

    def __init__(self, drawn: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types there
        self._drawn = drawn

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return that code under this mode may call torch.compile, as flex_attention does."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return (
            self._drawn(func, args, kwargs) if _draws(func, args, kwargs) else func(*args, **kwargs)
        )


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation draws: kernels of attention and rrelu have torch's tag even if they do not."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()) or "backward" in str(
        func
    ):
        return False
    arguments = _arguments(func, args, kwargs)
    own = arguments.get("generator") is not None  # a draw from a generator of one's own is torch's
    return not own and arguments.get("dropout_p") != 0.0 and arguments.get("training") is not False


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = {a.name: a.default_value for a in func._schema.arguments}
    return {**names, **dict(zip(names, args)), **kwargs}


def _by_row(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: Callable[..., Tensor]
) -> Any:
    """Run a random operation on numbers: torch draws first, for the result's form."""
    arguments, name = _arguments(func, args, kwargs), func._schema.name.removeprefix("aten::")
    x: Any = (
        arguments["self"].clone() if name == "rrelu_with_noise_" else arguments.get("self")
    )  # which torch overwrites
    result = func(*args, **kwargs)
    if name == "native_dropout":
        result[1].copy_(_below(numbers(result[1].shape), 1 - arguments["p"]))
        return result[0].copy_(
            arguments["input"]
            * result[1]
            * (0.0 if arguments["p"] == 1 else 1 / (1 - arguments["p"]))
        ), result[1]
    if name.rstrip("_") == "rrelu_with_noise":
        noise, low = arguments["noise"], arguments["lower"]
        slopes = _uniform(numbers(x.shape), x.dtype) * (arguments["upper"] - low) + low
        return result.copy_(x * noise.copy_(torch.where(x <= 0, slopes, torch.ones_like(slopes))))
    return result.copy_(_VALUES[name.rstrip("_")](arguments, result, numbers))


def _below(number: Tensor, chance: float) -> Tensor:
    return number < int(chance * 2.0**32)


def _uniform(number: Tensor, dtype: torch.dtype) -> Tensor:
    bits = _BITS.get(dtype, 24)
    return ((number >> (32 - bits)) * 2.0**-bits).to(dtype)


def _open(number: Tensor) -> Tensor:
    return (number.double() + 0.5) * 2.0**-32


def _bernoulli(given: dict[str, Any], like: Tensor, numbers: Callable[..., Tensor]) -> Tensor:
    chance = given.get("p", given["self"])
    return (
        _open(numbers(like.shape)) < chance
        if isinstance(chance, Tensor)
        else _below(numbers(like.shape), chance)
    )


def _from_to(given: dict[str, Any], like: Tensor, numbers: Callable[..., Tensor]) -> Tensor:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    result: Tensor = _uniform(numbers(like.shape), like.dtype) * (high - low) + low
    return result


def _normal(given: dict[str, Any], like: Tensor, numbers: Callable[..., Tensor]) -> Tensor:
    first, second = (_open(numbers(like.shape, stream)) for stream in (0, 1))
    result: Tensor = (-2 * first.log()).sqrt() * (2 * math.pi * second).cos() * given.get(
        "std", 1.0
    ) + given.get("mean", 0.0)
    return result


def _integers(given: dict[str, Any], like: Tensor, numbers: Callable[..., Tensor]) -> Tensor:
    low = given.get("low", given.get("from", 0))
    wide = (numbers(like.shape) << 31) + (numbers(like.shape, 1) >> 1)
    result: Tensor = wide % (given.get("high", given.get("to")) - low) + low
    return result


def _multinomial(given: dict[str, Any], like: Tensor, numbers: Callable[..., Tensor]) -> Tensor:
    shares, count = given["self"].double(), given["num_samples"]
    if count == 1 or not given["replacement"]:
        result: Tensor = (shares / -_open(numbers(shares.shape)).log()).topk(count, -1).indices
        return result
    sums = shares.cumsum(-1)
    drawn = torch.searchsorted(sums, _open(numbers(like.shape)) * sums[..., -1:], right=True)
    return drawn.clamp(max=shares.shape[-1] - 1)


_VALUES: Mapping[str, Callable[[dict[str, Any], Tensor, Callable[..., Tensor]], Tensor]] = {
    "bernoulli": _bernoulli,
    **dict.fromkeys(("rand", "rand_like", "uniform"), _from_to),
    **dict.fromkeys(("randn", "randn_like", "normal"), _normal),
    "log_normal": lambda given, like, numbers: _normal(given, like, numbers).exp(),
    "exponential": lambda given, like, numbers: -_open(numbers(like.shape)).log() / given["lambd"],
    "cauchy": lambda given, like, numbers: (
        ((_open(numbers(like.shape)) - 0.5) * math.pi).tan() * given["sigma"] + given["median"]
    ),
    "geometric": lambda given, like, numbers: (
        _open(numbers(like.shape)).log() / math.log1p(-given["p"])
    ).ceil(),
    **dict.fromkeys(("randint", "randint_like", "random"), _integers),
    "randperm": lambda given, like, numbers: numbers(like.shape).argsort(stable=True),
    "multinomial": _multinomial,
}
