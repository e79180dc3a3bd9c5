"""Find lower bounds of a strategy's time and memory before it is compiled.

They follow from what a strategy decides: which chunks a device runs, and how many microbatches are in flight there.
Only strategies whose directives all say what they decide (`piper_compiler.directives.decided`) have a sketch, as those
of Piper do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from piper_autotune.problem import Programs, TuningProblem, Wanted, bare_plan
from piper_compiler import EVERYWHERE, Strategy, apply_directives, build_graph, directives, policies_of, trains
from piper_ir.errors import PiperError
from piper_ir.graph import Graph
from piper_ir.mesh import Mesh
from piper_ir.ops import KEEP_ALL, Compute
from piper_ir.plan import COMPUTE, Bucket, Instr, Part, RolePlan
from piper_ir.plan_bytes import flat_bytes
from piper_ir.program import Chunk, Program, Step
from piper_ir.sizes import bind
from piper_simulator import CostModel, Device, device_memory, model_for

_PHASES = ("F", "B", "I", "W")
_NOBODY = RolePlan("", {}, (0,), (), ())

ChunkGroup = tuple[str, tuple[str, ...], int]
"""A role, some of its chunks, and how many microbatches of all of them are in flight at one moment, at least."""


@dataclass(frozen=True)
class Flight:
    """Describe the fullest moment of microbatches in flight.

    Attributes:
        most: how many have at one moment done their forward and not begun their backward.
        where: chunks that the same selections of an order match are at that moment together; without any order it is
            the moment when the loss is computed.
    """

    most: int = 1
    where: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sketch:
    """Hold the decisions of a strategy before it is compiled.

    Attributes:
        roles: the chunks of each role.
        groups: chunks of a role that are run in one order.
        policies: the policies of recomputation.
        variants: the names of variants of chunks that are under one.
    """

    microbatches: int
    replicas: int
    roles: Mapping[str, tuple[str, ...]]
    groups: tuple[ChunkGroup, ...]
    policies: tuple[str, ...] = ()
    variants: Mapping[str, str] = field(default_factory=dict)

    def names(self, chunks: Iterable[str]) -> Iterator[str]:
        """Yield the names of chunks, or of the variants that run in their place."""
        return (self.variants.get(chunk, chunk) for chunk in chunks)


class Sketches:
    """Keep sketches of a problem's strategies, and compute their bounds.

    Strategies that differ in order, microbatches or rows only share most of the work.
    """

    def __init__(self, problem: TuningProblem, programs: Programs) -> None:
        self._problem, self._programs = problem, programs
        self._placed: dict[Strategy, Graph | None] = {}
        self._seconds: dict[tuple[Mesh, Wanted], Mapping[str, float] | None] = {}
        self._states: dict[tuple[str, ...], int] = {}
        self._saved: dict[Wanted, Mapping[str, int]] = {}
        self._built: dict[tuple[Mesh, tuple[str, ...]], Graph] = {}

    def sketch(self, strategy: Strategy) -> Sketch | None:
        """Return the sketch of a strategy, or None.

        A strategy has none when a directive does not say what it decides, when it places a chunk by microbatch, when it
        overlaps pairs whose duration is given, or when it does not apply.
        """
        decisions = [found for d in strategy.directives if (found := directives.decided(d)) is not None]
        if len(decisions) < len(strategy.directives):
            return None
        graph = self._graph(strategy.mesh, decisions)
        if graph is None:
            return None
        roles: dict[str, list[str]] = {}
        variants: dict[str, str] = {}
        for chunk in graph.program.chunks:
            node = graph.compute(chunk.id, "F")[0]
            roles.setdefault(node.role or EVERYWHERE, []).append(chunk.id)
            if isinstance(node.op, Compute) and node.op.keep != KEEP_ALL:
                variants[chunk.id] = node.op.variant
        parts = next((d.microbatches for d in decisions if d.microbatches is not None), 1)
        orders = [d.order for d in decisions if d.order is not None]
        if graph.program.overlap and any(order.overlaps for order in orders):
            return None
        used = sorted({name for o in orders for s in o.selections for name, _ in s.terms} - {"phase", "mb"})
        flights: dict[tuple[int | str | None, ...], Flight] = {}
        groups: dict[tuple[str, Flight], list[str]] = {}
        for role, chunks in roles.items():
            for id in chunks:
                coords = graph.compute(id, "F")[0].coords
                key = tuple([coords.get(name) for name in used])
                if key not in flights:
                    flights[key] = max([Flight(), *(in_flight(order, coords) for order in orders)], key=lambda f: f.most)
                groups.setdefault((role, flights[key]), []).append(id)
        listed = tuple((role, tuple(ids), flight.most) for (role, flight), ids in groups.items())
        policies = policies_of(strategy.directives)
        return Sketch(parts, graph.replicas, {r: tuple(c) for r, c in roles.items()}, listed, policies, variants)

    def rows(self, sketch: Sketch) -> int | None:
        """Return the rows per microbatch and rank; None when the global batch does not divide."""
        if self._problem.global_batch is None:
            return 1
        rows, rest = divmod(self._problem.global_batch, sketch.microbatches * sketch.replicas)
        return None if rest or rows < 1 else rows

    def period_s(self, strategy: Strategy, sketch: Sketch, rows: int) -> float:
        """Return a lower bound of the seconds per step: the compute of the busiest role, one after the other.

        It is 0 with a cost model that does not promise that single steps are a bound.
        """
        if not self._problem.bounds_steps:
            return 0.0
        seconds = self._chunk_seconds(strategy.mesh, _wanted(sketch, rows))
        if seconds is None:
            return 0.0
        return sketch.microbatches * max(sum(seconds[c] for c in sketch.names(chunks)) for chunks in sketch.roles.values())

    def state_bytes(self, sketch: Sketch) -> tuple[int, str]:
        """Return a lower bound of the bytes of state on the fullest role, and which role it is.

        State is parameters, gradients, optimizer state and buffers.
        """
        return max((self._role_states(chunks), role) for role, chunks in sketch.roles.items())

    def filled_bytes(self, sketch: Sketch, rows: int) -> tuple[int, str, int]:
        """Return a lower bound of state and saved tensors: bytes, role, microbatches in flight there."""
        wanted = _wanted(sketch, rows)
        program = self._programs.exact(wanted)
        if program is None:
            return 0, "", 0
        if wanted not in self._saved:
            self._saved[wanted] = {c.variant: saved_bytes(c, rows) for c in (*program.chunks, *program.variants)}
        saved = self._saved[wanted]
        return max(
            (self._role_states(sketch.roles[role]) + most * sum(saved[c] for c in sketch.names(ids)), role, most)
            for role, ids, most in sketch.groups
        )

    def on_device(self, strategy: Strategy, nbytes: int) -> int:
        """Return the bytes in use on a device when the plan holds `nbytes`, without communicators."""
        bare, costs = bare_plan(self._problem.program, strategy.mesh, 1), self._problem.costs
        cluster = self._problem.cluster
        devices = (None,) if cluster is None else [kind.device for kind in cluster.kinds]
        allocator = None if costs is None else costs.allocator
        return min(device_memory(bare, _NOBODY, nbytes, device, allocator).total for device in devices)

    def _graph(self, mesh: Mesh, decisions: Sequence[directives.Decided]) -> Graph | None:
        """Return the graph of one microbatch with everything placed, without orders."""
        key = Strategy(mesh, [d.single for d in decisions if d.single is not None])
        if key not in self._placed:
            try:
                policies = policies_of(key.directives)
                if (key.mesh, policies) not in self._built:
                    program = self._programs.exact((0, policies)) if policies else None
                    self._built[key.mesh, policies] = build_graph(program or self._problem.program, key.mesh)
                graph = apply_directives(self._built[key.mesh, policies], key.directives)
                self._placed[key] = graph if graph.microbatches else directives.split_all(graph, 1)
            except PiperError:  # compiling it says what is wrong, in the user's terms
                self._placed[key] = None
        return self._placed[key]

    def _chunk_seconds(self, mesh: Mesh, wanted: Wanted) -> Mapping[str, float] | None:
        """Return the compute seconds of one microbatch by chunk and variant; None when they cannot be known."""
        key = (mesh, wanted)
        if key not in self._seconds:
            program = self._programs.exact(wanted)
            rows = wanted[0] if isinstance(wanted, tuple) else wanted
            self._seconds[key] = None if program is None else self._timed(program, mesh, rows)
        return self._seconds[key]

    def _timed(self, program: Program, mesh: Mesh, rows: int) -> Mapping[str, float] | None:
        chunks, variants = program.bound(rows), program.bound_variants(rows)
        cluster, costs = self._problem.cluster, self._problem.costs
        if costs is not None:  # what an instruction costs the host is paid once for all steps that it joins
            costs = replace(costs, host=None)
        only = (None,) if cluster is None else [cluster.only(k).each_device(_without_issue) for k in range(len(cluster.kinds))]
        bare = bare_plan(program, mesh, rows, chunks, variants)
        try:  # nobody knows yet where a chunk runs: on the fastest kind at best, and on a rank that is not slow
            models = [model_for(bare, one, costs, self._problem.model) for one in only]
            every = (*chunks, *variants)
            return {c.variant: sum(min(_step_seconds(m, c, step) for m in models) for step in c.steps) for c in every}
        except PiperError:  # no durations for this number of rows: scoring says so
            return None

    def _role_states(self, chunks: tuple[str, ...]) -> int:
        if chunks not in self._states:
            self._states[chunks] = self._states_of(chunks)
        return self._states[chunks]

    def _states_of(self, chunks: tuple[str, ...]) -> int:
        """Return the bytes of state of a role with these chunks.

        Elements are exact, without the padding of buckets; the optimizer's state is that of one bucket per group and
        dtypes.
        """
        program, training = self._problem.program, self._problem.training
        names = {(i.kind, i.ref) for c in chunks for i in program.chunk(c).inputs if i.kind in ("param", "buffer")}
        trained = {name for c in chunks for name in trains(program.chunk(c))}
        total = sum(bind(b.spec.nbytes, 0) for b in program.buffers if ("buffer", b.name) in names)
        groups: dict[tuple[int, tuple[str, str, str]], list[tuple[str, int]]] = {}
        for p in program.params:
            if ("param", p.name) not in names:
                continue
            if p.name not in trained:
                total += bind(p.spec.nbytes, 0)
                continue
            group = training.group_of.get(p.name, 0)
            groups.setdefault((group, training.bucket_dtypes(p)), []).append((p.name, bind(p.spec.numel, 0)))
        for (group, (dtype, compute, reduce)), members in groups.items():
            ids, numel = tuple(name for name, _ in members), sum(n for _, n in members)
            bucket = Bucket("", ids, (0,) * len(ids), numel, dtype, (), (), group, compute=compute, reduce=reduce)
            total += sum(flat_bytes(bucket).values()) + training.state_bytes(bucket)
        return total


def in_flight(order: directives.Ordered, coords: Mapping[str, int | str]) -> Flight:
    """Return the fullest moment of an order for a chunk with these coordinates (without phase and mb).

    Only microbatches count whose forward and backward (of a split one: the input gradient) are both in the order. In an
    overlap a backward may be first.
    """
    events: list[tuple[int, bool, int, int]] = []  # the item, whether forward, the selection, the microbatch
    begun: set[int] = set()
    together = {first + k: first for first, number in order.overlaps for k in range(number)}
    for place, selection in enumerate(order.selections):
        terms = dict(selection.terms)
        phase, mb = terms.get("phase"), terms.get("mb")
        if phase in _PHASES and isinstance(mb, int) and selection.matches({**coords, "phase": str(phase), "mb": mb}):
            events.append((together.get(place, place), phase == "F", place, mb))
            if phase in ("B", "I"):
                begun.add(mb)
    opened: set[int] = set()
    most = 0
    for _, forward, _, mb in sorted(events):
        if forward and mb in begun:
            opened.add(mb)
            most = max(most, len(opened))
        elif not forward:
            opened.discard(mb)
            begun.discard(mb)  # a forward after its backward opens nothing
    return Flight(most, (id(order), *(place for _, _, place, _ in events)))


def saved_bytes(chunk: Chunk, rows: int) -> int:
    """Return the bytes that a chunk's forward keeps for its backward, per microbatch."""
    read = {port for step in ("I", "W") if step in chunk.steps for port in chunk.steps[step].reads}
    kept = [port for port in chunk.steps["F"].writes if port.startswith("saved") and port in read]
    return sum(bind(chunk.ports[port].nbytes, rows) for port in kept)


def _wanted(sketch: Sketch, rows: int) -> Wanted:
    return (rows, sketch.policies) if sketch.policies else rows


def _step_seconds(model: CostModel, chunk: Chunk, step: Step) -> float:
    if chunk.steps[step].empty:
        return 0.0
    return model.work(_NOBODY, Instr(COMPUTE, (Part("", Compute(chunk.id, step, chunk.keep)),))).seconds


def _without_issue(device: Device) -> Device:
    return replace(device, host_issue_s=0.0)
