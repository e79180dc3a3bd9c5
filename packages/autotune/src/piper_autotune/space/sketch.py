"""Find lower bounds of a strategy's time and memory before it is compiled.

They follow from a strategy's decisions: which chunks a device runs, and how many microbatches are in flight there. Only
strategies whose directives all state their decisions (`piper_compiler.directives.decided`) have a sketch; Piper's own
directives do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from piper_autotune.space.flights import FullMoment, full_moments
from piper_autotune.space.in_flight_bound import FullestMoment
from piper_autotune.space.pipeline_bound import MicrobatchPaths
from piper_autotune.space.problem import Programs, TuningProblem, Wanted, bare_plan, wanted_by
from piper_autotune.space.whole_buckets import WholeBuckets, turns
from piper_compiler import (
    Strategy,
    apply_directives,
    build_graph,
    directives,
    rows_told,
    split_mesh,
    states,
    steps_of,
    with_buckets,
)
from piper_ir.graph.graph import Graph, Node
from piper_ir.ground.errors import PiperError
from piper_ir.ground.mesh import Mesh
from piper_ir.plan.plan import COMPUTE, Instr, Part, Plan, RolePlan
from piper_ir.program.ops import KEEP_ALL, Compute
from piper_ir.program.program import Chunk, Cost, Program, Step
from piper_simulator import CostModel, Device, DeviceModel, device_memory, model_for

ALONE = ("matmul", "attention")
"""The kinds of kernels that stay single operations where Inductor compiles groups."""
_NOBODY = RolePlan("", {}, (0,), (), ())


class StepTime(NamedTuple):
    """Hold the least that a step of a chunk takes: seconds on the device, and of the host that launches its kernels."""

    seconds: float
    launch_s: float


StepTimes = Mapping[str, Mapping[Step, StepTime]]
"""The least times of a microbatch by variant of a chunk and step."""


@dataclass(frozen=True)
class Sketch:
    """Hold the decisions of a strategy before it is compiled.

    Attributes:
        roles: the chunks of each role.
        wanted: the program, at any number of rows.
        variants: the names of variants of chunks that are under one.
        graph: one microbatch, placed, with the buckets of parameters.
        orders: the orders of devices.
        away: whether tensors that wait for a backward may leave the device.
    """

    microbatches: int
    replicas: int
    roles: Mapping[str, tuple[str, ...]]
    wanted: Wanted
    variants: Mapping[str, str] = field(default_factory=dict)
    graph: Graph = field(kw_only=True, compare=False, repr=False)
    orders: Sequence[directives.Ordered] = field(kw_only=True, compare=False, repr=False)
    away: bool = field(kw_only=True)

    @cached_property
    def moments(self) -> tuple[FullMoment, ...]:
        """Return the moments at which most microbatches of a role's chunks are in flight."""
        return full_moments(self.graph, self.roles, self.orders)

    @cached_property
    def weight_moments(self) -> tuple[FullMoment, ...]:
        """Return the moments at which most weight gradients of a role's chunks wait."""
        return full_moments(self.graph, self.roles, self.orders, weights=True)

    @cached_property
    def buckets(self) -> WholeBuckets:
        """Return the needs of sharded buckets."""
        return WholeBuckets(self.graph, turns(self.graph, self.orders, self.microbatches))

    def names(self, chunks: Iterable[str]) -> Iterator[str]:
        """Yield the names of chunks, or of the variants that run in their place."""
        return (self.variants.get(chunk, chunk) for chunk in chunks)


class Sketches:
    """Keep sketches of a problem's strategies, and compute their bounds.

    Strategies that differ in order, microbatches or rows only share most of the work.
    """

    def __init__(self, problem: TuningProblem, programs: Programs) -> None:
        self._problem, self._programs = problem, programs
        self._placed: dict[tuple[Strategy, Wanted], Graph | None] = {}
        self._bucketed: dict[int, Graph | None] = {}
        self._times: dict[tuple[Mesh, Wanted], StepTimes | None] = {}
        self._paths: dict[int, MicrobatchPaths] = {}
        self._states: dict[int, dict[str, int]] = {}
        self._chunks: dict[Wanted, Mapping[str, Chunk]] = {}
        self._built: dict[tuple[Mesh, Wanted], Graph] = {}

    def early(self, strategy: Strategy) -> Sketch | None:
        """Return a sketch whose sizes hold at its own rows, if the program at any rows is not there yet; else None.

        It takes a part of the traces, and is enough to bound the seconds of compute.
        """
        wanted = wanted_by(strategy, self._problem)
        if not wanted.request.shardings or wanted in self._programs.found:
            return None
        rows = rows_told(strategy, self._problem.global_batch)
        return self.sketch(strategy, rows) if rows else None

    def sketch(self, strategy: Strategy, early: int = 0) -> Sketch | None:
        """Return the sketch of a strategy, or None; with rows for `early`, one at these rows and without buckets.

        A strategy has none when a directive does not state its decisions, when it places a chunk by microbatch, when it
        overlaps pairs whose duration is given, or when it does not apply.
        """
        decisions = _decisions(strategy)
        if len(decisions) < len(strategy.directives):
            return None
        wanted = wanted_by(strategy, self._problem)
        rows = early or wanted_for_graph(self._problem, strategy).rows
        graph = self._graph(strategy.mesh, decisions, rows, early=bool(early))
        graph = graph if early or graph is None else self._with_buckets(graph)
        if graph is None:
            return None
        roles: dict[str, list[str]] = {}
        variants: dict[str, str] = {}
        for chunk in graph.program.chunks:
            node = graph.compute(chunk.id, "F")[0]
            roles.setdefault(node.role, []).append(chunk.id)
            if isinstance(node.op, Compute) and node.op.keep != KEEP_ALL:
                variants[chunk.id] = node.op.variant
        orders = [d.order for d in decisions if d.order is not None]
        if graph.program.overlap and any(order.overlaps for order in orders):
            return None
        return Sketch(
            _microbatches(decisions),
            graph.replicas,
            {r: tuple(c) for r, c in roles.items()},
            _early(wanted, early),
            variants,
            graph=graph,
            orders=orders,
            away=any(d.away for d in decisions),
        )

    def rows(self, sketch: Sketch) -> int | None:
        """Return the rows per microbatch and rank; None when the global batch does not divide."""
        if self._problem.global_batch is None:
            return 1
        rows, rest = divmod(self._problem.global_batch, sketch.microbatches * sketch.replicas)
        return None if rest or rows < 1 else rows

    def computing_s(
        self, strategy: Strategy, sketch: Sketch, rows: int, known_s: float = float("inf")
    ) -> tuple[float, str]:
        """Return a lower bound of the seconds per step by compute alone, and a text for its cause.

        A device runs its compute one after the other, its host launches the kernels one after the other, and a pipeline
        fills and drains; the last counts unless the device alone takes longer than `known_s`. It is 0 with a cost model
        that does not promise that single steps are a bound.
        """
        if not self._problem.bounds_steps:
            return 0.0, ""
        times = self._step_times(strategy.mesh, _wanted(sketch, rows))
        if times is None:
            return 0.0, ""

        def busiest(of: Callable[[StepTime], float]) -> float:
            by_chunk = {name: sum(map(of, steps.values())) for name, steps in times.items()}
            roles = [sketch.names(chunks) for chunks in sketch.roles.values()]
            return sketch.microbatches * max(sum(by_chunk[c] for c in names) for names in roles)

        computes = busiest(lambda time: time.seconds)
        launches = busiest(lambda time: time.launch_s)
        piped = self._pipeline_s(sketch, rows, times) if computes <= known_s else 0.0
        return max(
            (computes, "busiest device computes"),
            (launches, "busiest host launches kernels"),
            (piped, "pipeline computes, fills and drains"),
        )

    def _pipeline_s(self, sketch: Sketch, rows: int, times: StepTimes) -> float:
        """Return the least seconds of a step whose microbatches fill and drain the roles; 0.0 for one role."""
        if len(sketch.roles) < 2:
            return 0.0
        chunks = self._variants(_wanted(sketch, rows))

        def took(node: Node) -> float:
            op = node.op
            assert isinstance(op, Compute)
            own = times[op.variant]
            steps = steps_of(chunks[op.variant], op.step, op.apart)
            return sum([own[step].seconds for step in steps])

        key = id(sketch.graph)
        if key not in self._paths:
            self._paths[key] = MicrobatchPaths(sketch.graph)
        return self._paths[key].seconds(took, sketch.microbatches)

    def _variants(self, wanted: Wanted) -> Mapping[str, Chunk]:
        """Return the chunks of a program by the name of their variant; none if there is no program."""
        program = self._programs.exact(wanted)
        if program is None:
            return {}
        if wanted not in self._chunks:
            self._chunks[wanted] = {c.variant: c for c in (*program.chunks, *program.variants)}
        return self._chunks[wanted]

    def state_bytes(self, sketch: Sketch) -> Mapping[str, int]:
        """Return the bytes of state of each role.

        State is parameters, gradients, optimizer state and buffers, as far as a rank keeps them.
        """
        key = id(sketch.graph)
        if key not in self._states:
            states_by_role = states(sketch.graph, self._problem.training)
            self._states[key] = {
                role: sum([state.nbytes for state in own]) for role, own in states_by_role.items()
            }
        return self._states[key]

    def bucket_bytes(self, sketch: Sketch) -> Mapping[str, int]:
        """Return for each role a lower bound of state and of the whole buckets that one instruction uses."""
        return {
            role: kept + sketch.buckets.most[role]
            for role, kept in self.state_bytes(sketch).items()
        }

    def filled_bytes(self, sketch: Sketch, rows: int) -> Mapping[str, tuple[int, int]]:
        """Return for each role a lower bound of state and saved tensors, and the microbatches in flight."""
        chunks = self._variants(_wanted(sketch, rows))
        if not chunks:
            return {}
        moment = FullestMoment(sketch.graph, sketch.buckets, chunks, rows)
        kept, filled = self.state_bytes(sketch), dict[str, tuple[int, int]]()
        for moments, bytes_of in (
            (sketch.moments, moment.bytes_of),
            (sketch.weight_moments, moment.bytes_for_weights),
        ):
            for role, groups in moments:
                found = kept[role] + bytes_of(groups), sum(most for _, most in groups)
                filled[role] = max(filled.get(role, (0, 0)), found)
        return filled

    def on_device(self, sketch: Sketch, nbytes: int, role: str) -> int:
        """Return the bytes in use on a device when the plan holds `nbytes` on a role."""
        plan, costs, cluster = self._bare(sketch, 1), self._problem.costs, self._problem.cluster
        devices = (None,) if cluster is None else [kind.device for kind in cluster.kinds]
        allocator = None if costs is None else costs.allocator
        return min(
            device_memory(plan, plan.role(role), nbytes, device, allocator).total
            for device in devices
        )

    def _bare(self, sketch: Sketch, rows: int) -> Plan:
        """Return a plan of the roles, channels and buckets of a sketch, which runs nothing."""
        graph, program = sketch.graph, sketch.graph.program
        roles = tuple(
            [
                RolePlan(role, placed, graph.mesh.ranks(placed), (), (COMPUTE,))
                for role, placed in graph.roles.items()
            ]
        )
        graphs = self._problem.cuda_graph
        plan = bare_plan(program, graph.mesh, rows, program.chunks, cuda_graph=graphs)
        return replace(
            plan,
            roles=roles,
            channels=tuple(graph.channels.values()),
            buckets=tuple(graph.buckets.values()),
        )

    def messages_s(self, sketch: Sketch, rows: int) -> float:
        """Return the least seconds that the busiest stream needs for the messages of buckets, one after the other.

        It is 0 with another cost model than Piper's own.
        """
        if self._problem.model is not DeviceModel or not sketch.graph.replication:
            return 0.0
        plan = self._bare(sketch, rows)
        try:
            model = model_for(plan, self._problem.cluster, self._problem.costs, DeviceModel)
            busy: dict[tuple[str, str], float] = {}
            for role in plan.roles:
                for (stream, op), times in sketch.buckets.messages(role.role).items():
                    took = model.work(role, Instr(stream, (Part("", op),))).seconds
                    busy[role.role, stream] = busy.get((role.role, stream), 0.0) + times * took
            return max(busy.values(), default=0.0)
        except PiperError:  # scoring says it
            return 0.0

    def _graph(
        self, mesh: Mesh, decisions: Sequence[directives.Decided], rows: int, *, early: bool
    ) -> Graph | None:
        """Return the graph of one microbatch with everything placed, without orders and buckets.

        Its program is one at `rows` rows, or at any for 0.
        """
        single = Strategy(mesh, [d.single for d in decisions if d.single is not None])
        wanted = wanted_by(single, self._problem)
        wanted = _early(wanted, rows) if early else replace(wanted, rows=rows)
        key = single, wanted
        if key not in self._placed:
            try:
                if (mesh, wanted) not in self._built:
                    program = (
                        self._programs.exact(wanted) if wanted.special else None
                    ) or self._problem.program
                    self._built[mesh, wanted] = build_graph(program, split_mesh(mesh, program))
                graph = apply_directives(
                    self._built[mesh, wanted], single.directives, self._problem.kernels
                )
                self._placed[key] = graph if graph.microbatches else directives.split_all(graph, 1)
            except PiperError:  # compiling it names the problem, in the user's terms
                self._placed[key] = None
        return self._placed[key]

    def _with_buckets(self, placed: Graph) -> Graph | None:
        """Return a placed graph with the buckets of its parameters; None if they cannot be made."""
        if id(placed) not in self._bucketed:
            try:
                self._bucketed[id(placed)] = with_buckets(placed, self._problem.training)
            except PiperError:  # as above
                self._bucketed[id(placed)] = None
        return self._bucketed[id(placed)]

    def _step_times(self, mesh: Mesh, wanted: Wanted) -> StepTimes | None:
        """Return the times of one microbatch by variant and step; None when they cannot be known."""
        key = (mesh, wanted)
        if key not in self._times:
            program = self._programs.exact(wanted)
            self._times[key] = (
                None
                if program is None
                else self._timed(program, split_mesh(mesh, program), wanted.rows)
            )
        return self._times[key]

    @property
    def _alike(self) -> bool:
        """Return whether chunks of equal code take equally long: not with costs or a model that may name chunks."""
        program = self._problem.program
        return (
            self._problem.cluster is not None
            and self._problem.costs is None
            and self._problem.model is DeviceModel
            and all(c.code for c in program.chunks)
        )

    def _timed(self, program: Program, mesh: Mesh, rows: int) -> StepTimes | None:
        chunks, variants = program.bound(rows), program.bound_variants(rows)
        if self._problem.compiles:
            chunks, variants = (tuple(map(_products, cs)) for cs in (chunks, variants))
        cluster, costs = self._problem.cluster, self._problem.costs
        if (
            costs is not None
        ):  # what an instruction costs the host is paid once for all steps that it joins
            costs = replace(costs, host=None)
        only = (
            (None,)
            if cluster is None
            else [cluster.only(k).each_device(_without_issue) for k in range(len(cluster.kinds))]
        )
        graphs = self._problem.cuda_graph
        bare = bare_plan(program, mesh, rows, chunks, variants, cuda_graph=graphs)
        try:  # nobody knows yet where a chunk runs: on the fastest kind at best, and on a rank that is not slow
            models = [model_for(bare, one, costs, self._problem.model) for one in only]
            by_code: dict[str, Mapping[Step, StepTime]] = {}
            times: dict[str, Mapping[Step, StepTime]] = {}
            for c in (*chunks, *variants):
                known = by_code.get(c.code) if self._alike else None
                times[c.variant] = by_code[c.code] = known or {
                    step: _step_time(models, c, step) for step in c.steps
                }
            return times
        except PiperError:  # no durations for this number of rows: scoring says so
            return None


def _decisions(strategy: Strategy) -> list[directives.Decided]:
    """Return the decisions of the directives that state them."""
    every = (directives.decided(d) for d in strategy.directives)
    return [decision for decision in every if decision is not None]


def _microbatches(decisions: Iterable[directives.Decided]) -> int:
    return next((d.microbatches for d in decisions if d.microbatches is not None), 1)


def wanted_for_graph(problem: TuningProblem, strategy: Strategy) -> Wanted:
    """Return the program of which the graph of a strategy is made: at any rows, or at one row if that is enough.

    A program at one row has sizes from a trace of its own (`piper_capture.Captured.bind`), while one at any number of
    rows takes three more traces of chunks that devices share.
    """
    wanted = wanted_by(strategy, problem)
    alone = wanted.request.shardings and rows_told(strategy, problem.global_batch) == 1
    return replace(wanted, rows=1) if alone else wanted


def _early(wanted: Wanted, rows: int) -> Wanted:
    """Return the program at some rows that takes the fewest traces; at any for 0."""
    return replace(wanted, rows=rows, alone=rows > 1)


def _wanted(sketch: Sketch, rows: int) -> Wanted:
    return replace(sketch.wanted, rows=rows)


def _step_time(models: Iterable[CostModel], chunk: Chunk, step: Step) -> StepTime:
    """Return the least that a step takes by some models."""
    if chunk.steps[step].empty:
        return StepTime(0.0, 0.0)
    instr = Instr(COMPUTE, (Part("", Compute(chunk.id, step, chunk.keep)),))
    works = [model.work(_NOBODY, instr) for model in models]
    return StepTime(min(w.seconds for w in works), min(w.launch_s for w in works))


def _products(chunk: Chunk) -> Chunk:
    """Return a chunk with the products and attention of its steps alone, which no compiler joins with other kernels.

    Messages that kernels of a step hide depend on the kernels that are left out here, and count nothing.
    """
    steps = {}
    for name, step in chunk.steps.items():
        kept = Cost(tuple(k for k in step.cost.kernels if k.kind in ALONE))
        meets = () if step.overlaps else step.collectives
        steps[name] = replace(step, cost=kept, overlaps=(), collectives=meets)
    return replace(chunk, steps=steps)


def _without_issue(device: Device) -> Device:
    return replace(device, host_issue_s=0.0)
