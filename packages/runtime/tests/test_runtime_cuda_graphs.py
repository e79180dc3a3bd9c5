"""Steps launched as a graph, without CUDA: a tape of tensor operations is the graph, and steps equal issued ones.

On a device, see test_runtime_on_cuda.py."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from packages.runtime.tests.chains import chain
from packages.runtime.tests.fake_device import HostDevice
from packages.runtime.tests.handmade import CODE, adamw, chain_program
from piper_compiler import Options, Strategy, Training, compile_program, split
from piper_ir.ground.errors import ExecutionError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.plan.plan import COMPUTE, Plan
from piper_runtime import Job, execute
from piper_runtime.engine.cuda_graphs import WARM_STEPS, WHILE_CAPTURED, GraphedStep
from piper_runtime.engine.cuda_streams import CudaStreams
from piper_runtime.engine.engine import Engine
from piper_runtime.engine.memory import MemoryCounter
from piper_runtime.launch.running.inline_run import rank_job
from piper_runtime.rank.binding.parts import Thunk
from piper_runtime.rank.binding.rank import BoundInstr, Rank
from piper_runtime.rank.job.job import materialize
from piper_runtime.rank.job.loss_scale import LossScale
from piper_runtime.rank.optimizers.optimizer_groups import optimizer_spec
from piper_runtime.rank.values.device import CPU, LateNumbers
from piper_runtime.transport.gloo import GlooCommunicators
from piper_runtime.transport.transport import connected

STEPS = 6


class Tape(TorchDispatchMode):
    """A Graph: it keeps the operations on tensors of a captured step, with their tensors, and runs them again.

    As on a device, nothing is done when it captures: states are put back, and what was made is spoilt."""

    def __init__(self, states: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._states, self._ops = states, list[tuple[Any, Any, Any, Any]]()
        self.captures = self.replays = 0

    def streams(
        self, program: Sequence[BoundInstr], names: Iterable[str], heart: Any
    ) -> CudaStreams:
        return CudaStreams(program, names, heart, HostDevice())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._ops.append((func, args, kwargs or {}, result))
        return result

    def capture(self, body: Thunk) -> None:
        self.captures += 1
        before = [t.clone() for t in self._states]
        with self:
            body()
        held = {t.untyped_storage().data_ptr() for t in self._states}
        made = {t.untyped_storage().data_ptr(): t for op in self._ops for t in _tensors(op[3])}
        given = {t.untyped_storage().data_ptr() for op in self._ops for t in _tensors(op[1])}
        for place, t in made.items():
            if place not in held and place in given and t.is_floating_point():
                t.fill_(float("nan"))
        for t, old in zip(self._states, before, strict=True):
            t.copy_(old)

    def replay(self) -> Callable[[], bool]:
        self.replays += 1
        for func, args, kwargs, result in self._ops:
            for into, t in zip(_tensors(result), _tensors(func(*args, **kwargs)), strict=True):
                if into.data_ptr() != t.data_ptr():
                    into.copy_(t)
        return lambda: True

    def reset(self) -> None:
        self._ops.clear()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


Step = tuple[dict[str, dict[int, float]], float | None, dict[str, torch.Tensor]]


def trained(
    plan: Plan, job: Job, *, observed: int = -1, scale: LossScale | None = None
) -> tuple[list[Step], Tape]:
    """Losses, norm and states after each step, and the tape; the memory of the step `observed` is counted."""
    state = materialize(job)
    asked = replace(rank_job(job), loss_scale=scale)
    rank = Rank(plan, 0, CODE, asked, state.params, state.buffers, numbers=LateNumbers(CPU))
    tape = Tape(rank.store.state_tensors())
    heart = array("q", [0] * 16)
    home = CudaStreams(rank.entries, rank.role.streams, heart, HostDevice())
    graph = tape if plan.cuda_graph else None
    engine = Engine(rank, home, lambda comm: comm.alone, heart, graph=graph)
    steps = list[Step]()
    for step in range(STEPS):
        engine.step(step, counter=MemoryCounter() if step == observed else None)
        steps.append(
            ({k: dict(v) for k, v in rank.scalars.items()}, rank.gradient_norm, rank.states())
        )
    engine.close()
    return steps, tape


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


CASES: dict[str, dict[str, Any]] = {
    "clipped": dict(masked=True, clip_norm=0.01, optimizer=adamw, scheduler=halved),
    "random": dict(drop=True, draws="rows"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_launched_step_is_an_issued_one(
    case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both agree to the bit, though batches, rates, weights, random numbers and a buffer change with the step."""
    monkeypatch.setattr("piper_ops.random.draws._watchers", lambda: 0)  # the tape is no counter
    plan, job = chain(pp=1, microbatches=3, **case)
    issued, _ = trained(plan, job)
    launched, tape = trained(replace(plan, cuda_graph=True), job)
    assert (tape.captures, tape.replays) == (1, STEPS - WARM_STEPS)
    same(launched, issued)


def same(launched: list[Step], issued: list[Step]) -> None:
    for (scalars, norm, states), (other_scalars, other_norm, other) in zip(
        launched, issued, strict=True
    ):
        assert scalars == other_scalars and norm == other_norm
        assert (
            all(torch.equal(states[n], other[n]) for n in other) and states.keys() == other.keys()
        )


def scaled(cuda_graph: bool) -> tuple[Plan, Job]:
    """A chain with a scaled loss."""
    _, job = chain(pp=1, microbatches=2)
    program = chain_program(3)
    spec = optimizer_spec(job, program.params)
    lowered = compile_program(
        program,
        Strategy(Mesh(pp=1), (split(where(), microbatches=2),)),
        global_batch=job.global_batch,
        training=Training(spec.group_of, spec.state_bytes, scaled=True),
        options=Options(cuda_graph=cuda_graph),
    )
    return lowered.plan, job


def test_the_scale_of_the_loss_is_not_captured() -> None:
    """It grows in every step, until the gradient overflows and updates are skipped."""
    growing = LossScale(initial=1.0, growth=2.0**140, interval=1)
    issued, _ = trained(*scaled(False), scale=growing)
    launched, tape = trained(*scaled(True), scale=growing)
    same(launched, issued)
    assert tape.replays == STEPS - WARM_STEPS
    assert [norm is None for _, norm, _ in issued] == [False] * 4 + [True] * 2


def test_an_observed_step_is_issued_and_the_next_is_captured_anew() -> None:
    plan, job = chain(pp=1, microbatches=3)
    graphed = replace(plan, cuda_graph=True)
    launched, tape = trained(graphed, job, observed=3)
    assert (tape.captures, tape.replays) == (2, STEPS - WARM_STEPS - 1)
    same(launched, trained(plan, job)[0])


def test_what_waits_in_a_capture_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, job = chain(pp=1, microbatches=3)

    def waits(tape: Tape, func: Any, *_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Tape, "__torch_dispatch__", waits)
    with pytest.raises(ExecutionError) as caught:
        trained(replace(plan, cuda_graph=True), job)
    assert str(caught.value).startswith(f"rank 0, step {WARM_STEPS}, instruction 0 ")
    assert "stream is capturing" in str(caught.value)
    assert str(caught.value).endswith(WHILE_CAPTURED)


class Log(HostDevice):
    """A device that writes down what its streams are told."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, str, int]] = []
        self._names = iter("xyz")

    def current(self) -> Any:
        return COMPUTE

    def stream(self) -> Any:
        return next(self._names)

    def event(self, *, timed: bool = False) -> Any:
        return LoggedEvent(self)


class LoggedEvent:
    def __init__(self, device: Log) -> None:
        self._said = device.said

    def record(self, stream: Any) -> None:
        self._said.append(("record", stream, id(self)))

    def wait(self, stream: Any) -> None:
        self._said.append(("wait", stream, id(self)))


class Issued(Tape):
    """A graph that only issues what it captures, to a device that writes it down."""

    def __init__(self) -> None:
        super().__init__(())
        self.device = Log()

    def streams(self, program: Sequence[BoundInstr], names: Iterable[str], heart: Any) -> Any:
        return CudaStreams(program, names, heart, self.device)

    def capture(self, body: Thunk) -> None:
        body()


def test_a_capture_leaves_compute_and_comes_back_to_it() -> None:
    """CUDA asks for it: other streams first wait for compute, and compute at last waits for all of them."""
    plan, job = chain(pp=2, microbatches=2, optimizer=adamw)
    graphed, state, graph = replace(plan, cuda_graph=True), materialize(job), Issued()
    rank = Rank(
        graphed, 0, CODE, rank_job(job), state.params, state.buffers, numbers=LateNumbers(CPU)
    )
    home = CudaStreams(rank.entries, rank.role.streams, array("q", [0] * 16), HostDevice())
    works: list[Thunk] = [lambda: None for _ in rank.entries]
    step = GraphedStep(rank, works, array("q", [0] * 16), graph, home)
    assert step.size == len(rank.entries) - 1, "all but the update"
    step.launch(0)
    said = graph.device.said
    others = {e.stream for e in rank.entries} - {COMPUTE}
    begin = said[0]
    assert begin[:2] == ("record", COMPUTE)
    streams = {s for _, s, _ in said} - {COMPUTE}
    assert len(streams) == len(others) and all(
        next(x for x in said if x[1] == s) == ("wait", s, begin[2]) for s in streams
    )
    last = {[x for x in said if x[:2] == ("record", s)][-1][2] for s in streams}
    assert {x[2] for x in said[-len(others) :] if x[:2] == ("wait", COMPUTE)} == last


def test_without_a_device_such_a_plan_is_refused() -> None:
    plan, job = chain(pp=1)
    graphed, state = replace(plan, cuda_graph=True), materialize(job)
    with pytest.raises(ExecutionError, match=r"cuda_graph=True.*leave cuda_graph out"):
        execute(graphed, CODE, job, steps=1, launcher="inline")
    rank = Rank(graphed, 0, CODE, rank_job(job), state.params, state.buffers)
    gloo = GlooCommunicators(dist.HashStore(), 0)
    with pytest.raises(ExecutionError, match="cuda_graph=True needs a CUDA device"):
        connected(rank, gloo, array("q", [0] * 16), local_world=1, trace=False)
