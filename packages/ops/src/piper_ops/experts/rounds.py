"""Define the ops that trade rows between devices with different experts, in a fixed number of places.

Each of n devices has E / n experts, and rows of its own that are sorted by expert (`experts.route`). It sends each
other device the rows of that device's experts: always `slot` rows at once. Rows beyond that go in further rounds
through the same places, so that memory does not depend on the tokens' choices.

    table [n, E]        how many rows each device has for each expert: the counts of all, gathered
    experts_send        rows [M, W]        -> [n, slot, W], the rows for each device in round 0
    experts_take        [n, slot, W]       -> rows sorted by own expert [n slot, W], and how many each has
    experts_give        [n slot, W]        -> [n, slot, W], back in the order in which they came
    experts_home        [n, slot, W]       -> [M, W], each row of round 0 where it was sent from, zeros elsewhere
    experts_return      the same, with the rows of all further rounds

Between them stand all-to-alls. Where m devices cut each expert (tensor parallelism), these gather the rows that each
has received, and their results are partial sums, which they reduce-scatter:

    every [m, n, E]     the tables of these devices, gathered, for `experts_take` and `experts_give`
    experts_take        [m n, slot, W]     -> as above, of the messages to all m devices

The devices compute the further rounds inside of `experts_return` and its gradients:
`body` is the source of a function from [rows, counts, *weights] to the experts' result. The code of a step defines that
function and hands it over as an `ExpertBody`. Its gradients are made by autograd, anew in each of them, since nothing
is kept of further rounds. All devices know the table, so all run as many rounds as the fullest pair of them needs. They
hold `room` bytes from the start, in every step, so that a step with further rounds needs no more memory than one
without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piper_ops.experts import reserved
from piper_ops.experts.trades import Round
from piper_ops.experts.trades import add_home as _add_home
from piper_ops.experts.trades import give as _give
from piper_ops.experts.trades import home as _home
from piper_ops.experts.trades import send as _send
from piper_ops.experts.trades import senders as _senders
from piper_ops.experts.trades import take as _take
from piper_ops.experts.trades import totals as _totals
from piper_ops.ground.errors import ExpertsOverflow
from piper_ops.ground.library import LIBRARY, contiguous_empty, define

ANY_ROWS = "# any number of rows and experts\n"
"""The last line of the source of a body that takes any number of rows and of experts."""
Exchanged = Callable[[str, str, Tensor], Tensor]
"""A function that runs a collective: of a kind, along an axis, with the device's operand."""


@dataclass(frozen=True, slots=True)
class ExpertBody:
    """Hold the experts' computation on rows of all devices.

    Attributes:
        run: a function from [rows, counts, *weights] to a tuple of the experts' result.
        any_rows: whether it takes any number of rows and of experts; a round then passes only its own.
    """

    run: Callable[[list[Tensor]], tuple[Tensor, ...]]
    any_rows: bool


def round_count(table: Tensor, slot: int) -> int:
    """Return how many rounds all devices run: at least one; the host waits for it. Two for tensors without content."""
    if table.is_meta:
        return 2
    return max(1, -(-_most(table) // slot))


def _most(table: Tensor) -> int:
    """Return how many rows the fullest pair of devices has; the host waits for it."""
    return int(_totals(table).max())


# --- further rounds


@dataclass(frozen=True, slots=True)
class _Rounds:
    """Run further rounds: the rows to experts, and the results back.

    Attributes:
        exchange: runs a collective between the devices.
        table: the counts of the devices that exchange rows [n, E].
        every: the counts of all devices whose rows are computed together: `table`, or [m, n, E].
        weights: the matrices of the own experts.
        body: the experts' computation.
        axis: the axis along which the devices lie.
        within: the axis of the devices that cut each expert; "" if each device has whole ones.
        slot: the places for each other device in a round.
        place: the place of this device.
    """

    exchange: Exchanged
    table: Tensor
    every: Tensor
    weights: Sequence[Tensor]
    body: ExpertBody
    axis: str
    within: str
    slot: int
    place: int

    @property
    def numbers(self) -> range:
        return range(1, round_count(self.every, self.slot))

    def _trades(self, number: int) -> tuple[Round, Round]:
        """Return a round as sender and as receiver, of the places that the fullest pair needs if the body takes any."""
        fewer = None
        if self.body.any_rows and not self.table.is_meta:
            fewer = max(1, min(self.slot, _most(self.every) - number * self.slot))
        return tuple(
            Round(t, self.place, self.slot, number, fewer) for t in (self.table, self.every)
        )  # type: ignore[return-value]  # two

    def there(self, rows: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Return the rows of all devices for the own experts, and their counts."""
        sent, received = self._trades(number)
        came = self.exchange("all_to_all", self.axis, _send(rows, sent))
        if self.within:
            came = self.exchange("all_gather", self.within, came).flatten(0, 1)
        return _take(came, received)

    def add_back(self, made: Tensor, number: int, total: Tensor) -> None:
        """Add all devices' results for the own rows to `total`, in the rows' places."""
        sent, received = self._trades(number)
        given = _give(made, received)
        if self.within:
            stacked = given.unflatten(0, self.every.shape[:2])
            given = self.exchange("reduce_scatter", self.within, stacked)
        _add_home(self.exchange("all_to_all", self.axis, given), sent, total)

    def made(self, rows: Tensor, counts: Tensor, weights: Sequence[Tensor]) -> Tensor:
        return self.body.run([rows, counts, *weights])[0]

    def busy(self, counts: Tensor) -> slice:
        """Return the range of experts with rows in a round, if the body takes any number of experts; else all."""
        if not self.body.any_rows or counts.is_meta:
            return slice(0, counts.shape[0])
        busy = [k for k, count in enumerate(counts.tolist()) if count]
        return slice(busy[0], busy[-1] + 1) if busy else slice(0, 1)


def run_return(
    exchange: Exchanged, back: Tensor, rows: Tensor, table: Tensor, every: Tensor, weights: Sequence[Tensor],
    body: ExpertBody, axis: str, within: str, slot: int, place: int, room: Sequence[int],
) -> Tensor:  # fmt: skip
    """Compute piper::experts_return."""
    reserved.reserve(room[0], rows.device)
    total = _home(back, Round(table, place, slot), rows.shape[0])
    run = _Rounds(exchange, table, every, weights, body, axis, within, slot, place)
    for number in run.numbers:
        run.add_back(run.made(*run.there(rows, number), weights), number, total)
    return total


def run_return_dgrad(exchange: Exchanged, grad: Tensor, rows: Tensor, *rest: Any) -> Tensor:
    """Compute the gradient of the rows of further rounds; the rows of round 0 have zeros."""
    *how, room = rest
    reserved.reserve(room[1], rows.device)
    return _add_dgrad(_Rounds(exchange, *how), torch.zeros_like(rows), grad, rows)


def run_further_dgrad(exchange: Exchanged, grad: Tensor, rows: Tensor, *rest: Any) -> Tensor:
    """Add the gradient of the rows of further rounds to `total`, the gradient of the rows of round 0."""
    *how, room, total = rest
    reserved.reserve(room[3], rows.device)
    return _add_dgrad(_Rounds(exchange, *how), total, grad, rows)


def _add_dgrad(run: _Rounds, total: Tensor, grad: Tensor, rows: Tensor) -> Tensor:
    for number in run.numbers:
        received, counts = run.there(rows, number)
        above, _ = run.there(grad, number)
        with torch.enable_grad():
            result = run.made(received.requires_grad_(), counts, run.weights)
        (gradient,) = torch.autograd.grad(result, received, above)
        del result, above, received
        run.add_back(gradient, number, total)
        del gradient
    return total


def run_return_wgrad(exchange: Exchanged, grad: Tensor, rows: Tensor, *rest: Any) -> list[Tensor]:
    """Compute the gradients of the wanted matrices in further rounds."""
    *how, room, wanted = rest
    reserved.reserve(room[2], rows.device)
    run = _Rounds(exchange, *how)
    totals = [torch.zeros_like(w) for w, mine in zip(run.weights, wanted, strict=True) if mine]
    _add_wgrad(run, totals, wanted, grad, rows)
    return totals


def run_further_wgrad(exchange: Exchanged, grad: Tensor, rows: Tensor, *rest: Any) -> Tensor:
    """Add the gradients of the matrices to their running sums, the tensors of `total` and `others`."""
    *how, room, wanted, others, total = rest
    reserved.reserve(room[4], rows.device)
    _add_wgrad(_Rounds(exchange, *how), [total, *others], wanted, grad, rows)
    return total  # type: ignore[no-any-return]  # a tensor


def _add_wgrad(
    run: _Rounds, totals: Sequence[Tensor], wanted: Sequence[bool], grad: Tensor, rows: Tensor
) -> None:
    if not any(wanted):  # frozen experts: all devices know it, and none exchanges anything
        return
    for number in run.numbers:
        received, counts = run.there(rows, number)
        above, _ = run.there(grad, number)
        busy = run.busy(counts)
        own = [
            w[busy].detach().requires_grad_(mine)
            for w, mine in zip(run.weights, wanted, strict=True)
        ]
        with torch.enable_grad():
            result = run.made(received, counts[busy], own)
        gradients = torch.autograd.grad(result, [w for w in own if w.requires_grad], above)
        del result, above, received, own
        for total, one in zip(totals, gradients, strict=True):
            total[busy].add_(one)
        del gradients, one


# --- choices that have no place, and counts beyond the places


def _drop_kernel(chosen: Tensor, experts: int, degree: int, slot: int) -> Tensor:
    """Return the choices, with `experts` in place of the ones beyond the first `slot` for each device."""
    device = chosen.reshape(-1).div(experts // degree, rounding_mode="floor")
    before = (device.unsqueeze(1) == torch.arange(degree, device=chosen.device)).cumsum(
        0, dtype=torch.int32
    )
    turn = before.gather(1, device.unsqueeze(1)).view(chosen.shape)
    return torch.where(turn <= slot, chosen, experts)


def _checked_kernel(table: Tensor, slot: int, bound: float, rows: int, mean: float) -> Tensor:
    if not table.is_meta and round_count(table, slot) > 1:
        most = _most(table)
        enough = math.ceil(-(-most // rows) / mean * 100) / 100
        raise ExpertsOverflow(
            f"a device has {most} rows for the experts of another, and bound={bound:g} has places for {slot}; "
            f"bound={enough:g} would do in this step, and overflow='rounds' in every one"
        )
    return table.clone()


# --- shapes


def _send_fake(rows: Tensor, table: Tensor, place: int, slot: int) -> Tensor:
    return contiguous_empty(rows, (table.shape[0], slot, rows.shape[1]))


def _home_fake(back: Tensor, table: Tensor, place: int, rows: int) -> Tensor:
    return contiguous_empty(back, (rows, back.shape[2]))


def _take_fake(came: Tensor, table: Tensor, place: int) -> tuple[Tensor, Tensor]:
    devices, slot, width = came.shape
    return contiguous_empty(came, (devices * slot, width)), contiguous_empty(
        table, (table.shape[-1] // table.shape[-2],)
    )


def _give_fake(made: Tensor, table: Tensor, place: int) -> Tensor:
    devices = _senders(table)
    return contiguous_empty(made, (devices, made.shape[0] // devices, made.shape[1]))


def _return_fake(back: Tensor, rows: Tensor, *_: Any) -> Tensor:
    return contiguous_empty(back, (rows.shape[0], back.shape[2]))


def _return_dgrad_fake(grad: Tensor, rows: Tensor, *_: Any) -> Tensor:
    return contiguous_empty(rows, rows.shape)


def _return_wgrad_fake(
    grad: Tensor, rows: Tensor, table: Tensor, every: Tensor, weights: Sequence[Tensor], *rest: Any
) -> list[Tensor]:
    return [contiguous_empty(w, w.shape) for w, mine in zip(weights, rest[-1], strict=True) if mine]


def _elsewhere(*args: Any) -> Any:
    raise RuntimeError(
        "further rounds of experts are run by the engine that runs the step, not as an op"
    )


# --- gradients of autograd


def _send_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rows, ctx.place = inputs[0].shape[0], inputs[2]
    ctx.save_for_backward(inputs[1])


def _send_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return experts_home(grad, ctx.saved_tensors[0], ctx.place, ctx.rows), None, None, None


def _home_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.slot, ctx.place = inputs[0].shape[1], inputs[2]
    ctx.save_for_backward(inputs[1])


def _home_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return experts_send(grad, ctx.saved_tensors[0], ctx.place, ctx.slot), None, None, None


def _take_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.place = inputs[2]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[1])


def _take_backward(ctx: Any, grad: Tensor | None, of_counts: Tensor | None) -> tuple[Any, ...]:
    return (
        (None if grad is None else experts_give(grad, ctx.saved_tensors[0], ctx.place)),
        None,
        None,
    )


def _give_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.place = inputs[2]
    ctx.save_for_backward(inputs[1])


def _give_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return experts_take(grad, ctx.saved_tensors[0], ctx.place)[0], None, None


def _return_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, rows, table, every, weights, *ctx.rest = inputs
    ctx.wanted = [w.requires_grad for w in weights]
    ctx.wants_rows = rows.requires_grad
    ctx.save_for_backward(rows, table, every, *weights)


def _return_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, table, every, *weights = ctx.saved_tensors
    *_, slot, place, _ = ctx.rest
    how = (grad, rows, table, every, weights, *ctx.rest)
    of_back = experts_send(grad, table, place, slot)
    of_rows = experts_return_dgrad(*how) if ctx.wants_rows else None
    of_weights: list[Tensor | None] = [None for _ in weights]
    if any(ctx.wanted):
        gradients = iter(experts_return_wgrad(*how, ctx.wanted))
        of_weights = [next(gradients) if mine else None for mine in ctx.wanted]
    return of_back, of_rows, None, None, of_weights, *(None for _ in ctx.rest)


_SCHEMA = (
    "Tensor rows, Tensor table, Tensor every, Tensor[] weights, str body, str axis, str within, int slot, int place, "
    "int[] room"
)

experts_home = define(
    "experts_home", "(Tensor back, Tensor table, int place, int rows) -> Tensor", _home_fake,
    lambda back, table, place, rows: _home(back, Round(table, place, back.shape[1]), rows),
    direct=True, backward=_home_backward, setup_context=_home_setup,
)  # fmt: skip
"""An op that returns the rows (M, W) of round 0 at the places that they were sent from; zeros elsewhere."""
experts_send = define(
    "experts_send", "(Tensor rows, Tensor table, int place, int slot) -> Tensor", _send_fake,
    lambda rows, table, place, slot: _send(rows, Round(table, place, slot)),
    direct=True, backward=_send_backward, setup_context=_send_setup,
)  # fmt: skip
"""An op that returns the rows for each device in round 0, (n, slot, W)."""
experts_give = define(
    "experts_give", "(Tensor made, Tensor table, int place) -> Tensor", _give_fake,
    lambda made, table, place: _give(made, Round(table, place, len(made) // _senders(table))),
    direct=True, backward=_give_backward, setup_context=_give_setup,
)  # fmt: skip
"""An op that puts rows that are sorted by expert into the order of their arrival in round 0."""
experts_take = define(
    "experts_take", "(Tensor came, Tensor table, int place) -> (Tensor, Tensor)", _take_fake,
    lambda came, table, place: _take(came, Round(table, place, came.shape[1])),
    direct=True, backward=_take_backward, setup_context=_take_setup,
)  # fmt: skip
"""An op that sorts the rows received in round 0 by own expert, and returns how many rows each has."""
experts_return_dgrad = define(
    "experts_return_dgrad", f"(Tensor grad, {_SCHEMA}) -> Tensor", _return_dgrad_fake, _elsewhere
)
"""An op that returns the gradient of the rows of further rounds."""
experts_return_wgrad = define(
    "experts_return_wgrad",
    f"(Tensor grad, {_SCHEMA}, bool[] wanted) -> Tensor[]",
    _return_wgrad_fake,
    _elsewhere,
)
"""An op that returns the gradients of matrices in further rounds."""
experts_return = define(
    "experts_return", f"(Tensor back, {_SCHEMA}) -> Tensor", _return_fake, _elsewhere,
    backward=_return_backward, setup_context=_return_setup,
)  # fmt: skip
"""An op that returns all rows (M, W) at the places that they were sent from, after further rounds."""
for _name, _more in (
    ("dgrad", "Tensor(a!) total"),
    ("wgrad", "bool[] wanted, Tensor(b!)[] others, Tensor(a!) total"),
):
    LIBRARY.define(f"experts_further_{_name}_(Tensor grad, {_SCHEMA}, {_more}) -> Tensor(a!)")
experts_further_dgrad_ = torch.ops.piper.experts_further_dgrad_.default
experts_further_wgrad_ = torch.ops.piper.experts_further_wgrad_.default
"""The in-place variants, which add to the results of round 0: to a gradient of rows, or to sums of gradients."""
experts_drop = define(
    "experts_drop", "(Tensor chosen, int experts, int degree, int slot) -> Tensor",
    lambda chosen, *_: contiguous_empty(chosen, chosen.shape), _drop_kernel, direct=True,
)  # fmt: skip
"""An op that returns choices, with the number of experts in place of choices without a place in round 0."""
experts_checked = define(
    "experts_checked", "(Tensor table, int slot, float bound, int rows, float mean) -> Tensor",
    lambda table, *_: contiguous_empty(table, table.shape), _checked_kernel, direct=True,
)  # fmt: skip
"""An op that returns the table, and raises ExpertsOverflow if one round has too few places.

`mean` is how many of the tokens of each of `rows` go to each device if experts are chosen equally often.
"""

BODY, AXIS, WITHIN = 5, 6, 7
"""The numbers of the arguments `body`, `axis` and `within` of these ops."""
ROUNDS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    experts_return: run_return,
    experts_return_dgrad: run_return_dgrad,
    experts_return_wgrad: run_return_wgrad,
    experts_further_dgrad_: run_further_dgrad,
    experts_further_wgrad_: run_further_wgrad,
}
"""The ops with a varying number of exchanges between devices, each with its function, which gets the exchange."""
PLACED: dict[torch._ops.OpOverload, int] = {
    experts_home: 2, experts_send: 2, experts_give: 2, experts_take: 2, **dict.fromkeys(ROUNDS, 9),
}  # fmt: skip
"""The ops that ask for the device's place along the axis, each with the number of that argument."""
