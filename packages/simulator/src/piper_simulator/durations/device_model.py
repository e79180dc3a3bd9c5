"""Give durations by formulas and tables, as Piper's own cost model.

Compute is in `piper_simulator.durations.kernels`, messages in `piper_simulator.durations.message_durations`. Everything
else is one kernel that moves bytes of memory. A role's instructions take as long as on the slowest of its ranks.
`simulate` passes roles whose ranks are alike (`piper_simulator.times.splitting`).

A step whose work devices share takes as long as its kernels and the messages inside of it, one after the other; so
does one of dropless experts. Of a message that is under way while the step computes, only the time counts that the
kernels beside it leave over. Measured durations of such steps count the kernels alone.

If the host is the device (a CPU), the processor time of a message delays the computation that comes next, unless
that waits for the message anyway: one core per rank does both, however many threads share it.
"""

from __future__ import annotations

from dataclasses import replace

from piper_ir.ground.errors import ClusterError
from piper_ir.ground.trace import Source
from piper_ir.plan.plan import Channel, Instr, Part, Plan, RolePlan
from piper_ir.plan.plan_bytes import PlanBytes
from piper_ir.program.costs import Costs, Duration
from piper_ir.program.ops import COMM, Comm, Compute, Load, Update, cost_op, message_op
from piper_ir.program.program import Chunk, Cost, Step
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.cluster.device import Device
from piper_simulator.durations.cost_model import CostModel, StepMessages, Work, given_only
from piper_simulator.durations.expert_work import EVEN, Loads, loaded, messages, without_places
from piper_simulator.durations.hidden_messages import beside_kernels, summed
from piper_simulator.durations.instances import axes_inside, meeting_inside
from piper_simulator.durations.kernels import Took, guessed_rates, lacks_number, launched, step_took
from piper_simulator.durations.launches import (
    costs_by_device,
    issue_seconds,
    launching_devices,
    spared_launches,
)
from piper_simulator.durations.message_durations import MessageDurations, no_duration
from piper_simulator.durations.provenance import Provenance
from piper_simulator.durations.updates import Updated, update_seconds, updated

_TRUST: tuple[Source, ...] = ("formula", "interpolated", "table", "measured", "given")
"""The sources from least to most trusted; an instruction of several parts has the label of its least trusted part."""


class DeviceModel(CostModel):
    """Look durations up, or compute them.

    They are given by the program, else looked up in `costs`, else computed for `cluster`. Raises ClusterError when a
    duration must be computed and there is no cluster, and when the costs were taken at another number of rows per
    microbatch.

    On a cluster of several kinds of devices costs hold for the kind on which they were taken, and for all if that kind
    is not in it. If the host is the device, the time to issue an instruction is part of the instruction, and `issue_s`
    is 0.

    `loads`: tokens of the fullest rank's experts over the mean, with their shares. They decide how long dropless
    experts take (`piper_simulator.durations.expert_work`): as long as under each of them, on average. A measured
    duration changes as its formula does.

    Steps that are CUDA graphs (`Plan.cuda_graph`) take as `piper_simulator.durations.launches` says. A measured
    duration stays as it is: where the host was slower than the device, it has the host's time.
    """

    def __init__(
        self, plan: Plan, cluster: Cluster | None, costs: Costs | None, loads: Loads = EVEN
    ) -> None:
        self.plan, self.cluster, self.costs, self.loads = plan, cluster, costs or Costs(), loads
        self.given = given_only(plan)
        if self.costs.compute and self.costs.rows not in (None, plan.rows):
            raise ClusterError(
                f"the costs hold for {self.costs.rows} rows per microbatch; the plan has {plan.rows}: measure them "
                f"at {plan.rows}"
            )
        self._devices = launching_devices(plan, cluster)
        self._known = costs_by_device(self._devices, self.costs)
        self._provenance = Provenance(plan, cluster, self.costs)
        self._inline = cluster is not None and cluster.synchronous
        issue = 0.0 if self.given else issue_seconds(plan, cluster, self.costs)
        self.issue_s, self._inline_s = (0.0, issue) if self._inline else (issue, 0.0)
        self.uniform = not self._inline and all(part.op != "Batch" for part in self.costs.parts)
        self._traffic = PlanBytes(plan)
        self._steps: dict[tuple[Compute, int], Work] = {}
        self._meets = bool(axes_inside(plan))
        self._inside: dict[tuple[Compute, int, str], Work] = {}
        self._took: dict[tuple[int, Step, int], tuple[Took, int, tuple[str, ...]]] = {}
        self._slowest: dict[str, float] = {}
        self._others: dict[tuple[str, int, Updated | None, int], Work] = {}
        self._kinds_of: dict[str, tuple[int, ...]] = {}
        self._beside: dict[str, dict[int, float]] = {}
        self._calls: dict[str, set[int]] = {}
        self._computes: dict[str, float] = {}
        self._messages = MessageDurations(
            plan,
            cluster,
            self.costs,
            known=self._known,
            kinds_in=self._kinds_in,
            given=self.given,
            device=self._devices[0],
            provenance=self._provenance,
        )

    def work(self, role: RolePlan, instr: Instr) -> Work:
        """Return duration, source, bytes and FLOPs of one instruction of a role."""
        op = instr.parts[0].op
        if isinstance(op, COMM):
            return self._comm(op, instr.parts[0])
        kinds, factor = self._kinds_in(role), self._slower(role)
        done = self._computed(role, instr, kinds[0])
        if len(kinds) > 1:
            done = max(
                [done, *(self._computed(role, instr, k) for k in kinds[1:])],
                key=lambda w: w.seconds,
            )
        if factor == 1:
            return done
        seconds = done.seconds + (factor - 1) * (done.seconds - done.inside_s)
        return replace(done, seconds=seconds, launch_s=factor * done.launch_s)

    def _kinds_in(self, role: RolePlan) -> tuple[int, ...]:
        if len(self._devices) == 1 or self.cluster is None:
            return (0,)
        if role.role not in self._kinds_of:
            self._kinds_of[role.role] = tuple(
                sorted({self.cluster.kind_of(rank) for rank in role.ranks})
            )
        return self._kinds_of[role.role]

    def _computed(self, role: RolePlan, instr: Instr, kind: int) -> Work:
        """Return the work of an instruction of the compute stream on a rank of one kind that is not slow."""
        parts = [self._part(role, part, kind) for part in instr.parts]
        if instr.seconds is not None:
            return Work(instr.seconds, "given", flops=sum([p.flops for p in parts]))
        more = self._inline_s + self._taken(role, instr)
        if len(parts) == 1 and not more:
            return parts[0]
        seconds = more + sum([p.seconds for p in parts])
        done = Work(
            seconds,
            min([p.source for p in parts], key=_TRUST.index),
            flops=sum([p.flops for p in parts]),
            launch_s=sum([p.launch_s for p in parts]),
        )
        if not self._meets:
            return done
        inside = [(m, 1) for p in parts for m in p.inside]
        return replace(done, bytes=sum([m.bytes for m, _ in inside]), inside=summed(inside))

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes on unmeasured constants, guesses, and costs that do not fit, among the durations so far."""
        return self._provenance.notes()

    def _slower(self, role: RolePlan) -> float:
        """Return how many times as long the slowest rank of a role takes."""
        if self.cluster is None or not self.cluster.slow_ranks:
            return 1.0
        if role.role not in self._slowest:
            slow = {r: f for r, f in self.cluster.slow_ranks.items() if r in role.ranks}
            self._slowest[role.role] = max(slow.values(), default=1.0)
            self._provenance.slowed(role.role, slow)
        return self._slowest[role.role]

    def _taken(self, role: RolePlan, instr: Instr) -> float:
        """Return the seconds by which messages delay an instruction of the compute stream."""
        if not self._inline or self.given or self.costs.host is None:
            return 0.0
        if role.role not in self._beside:
            self._beside[role.role] = self._taken_by_messages(role, self.costs.host.comm_s)
        return self._beside[role.role].get(id(instr), 0.0)

    def _taken_by_messages(self, role: RolePlan, each: float) -> dict[int, float]:
        """Return the delay of each instruction of the compute stream, by identity.

        It is the processor seconds of the messages issued since the instruction before it.
        """
        taken: dict[int, float] = {}
        issued: list[tuple[str, int, float]] = []
        count: dict[str, int] = {}
        for instr in role.program:
            op = instr.parts[0].op
            if isinstance(op, COMM):
                count[instr.stream] = count.get(instr.stream, 0) + 1
                issued.append(
                    (
                        instr.stream,
                        count[instr.stream],
                        self._messages.busy_s(*self._message(op, instr.parts[0])),
                    )
                )
            elif issued:
                awaited = dict(instr.waits)
                taken[id(instr)] = sum(
                    each + (0.0 if awaited.get(stream, 0) >= k else busy)
                    for stream, k, busy in issued
                )
                issued.clear()
        return taken

    def _part(self, role: RolePlan, part: Part, kind: int) -> Work:
        if isinstance(part.op, Compute):
            if (part.op, kind) not in self._steps:
                self._steps[part.op, kind] = self._step(part.op, kind)
            return (
                self._with_messages(role, part.op, kind)
                if self._meets
                else self._steps[part.op, kind]
            )
        if self.given:
            return Work(0.0, "given")
        update = updated(self.plan, role, part.op) if isinstance(part.op, Update) else None
        key = (cost_op(part.op), self._traffic.memory_bytes(role, part), update, kind)
        if key not in self._others:
            self._others[key] = self._other(*key, part.node)
        work = self._others[key]
        called = self._batch_s(role, part) if isinstance(part.op, Load) else 0.0
        return replace(work, seconds=work.seconds + called) if called else work

    def _other(self, op: str, touched: int, update: Updated | None, kind: int, node: str) -> Work:
        known = self._known[kind].of_part(op, touched)
        if known is not None:
            return Work(known.seconds, known.source)
        device = self._need(node, kind)
        self._provenance.computed()
        if update is not None and (device.stack or update.host or update.products):
            seconds, launch_s = update_seconds(device, update, self.cluster, kind)
        else:
            moving = touched / (device.memory_bandwidth * device.memory_fraction)
            seconds, launch_s = launched(device, moving, 1)
        return Work(seconds, "formula", launch_s=launch_s)

    def _batch_s(self, role: RolePlan, part: Part) -> float:
        """Return the seconds that a load waits for the job's batch function: the first of a microbatch on a role.

        If the host is the device, a core does the function's work as well as the compute, so all of it counts.
        Elsewhere the loader of the runtime calls it beside the device, one step ahead, and only the time beyond the
        compute of a step counts.
        """
        known = self.costs.of_part("Batch", self.plan.rows)
        if known is None or not self._is_first(role, part):
            return 0.0
        if self._inline:
            return known.seconds
        return max(0.0, known.seconds - self._step_s(role) / len(self._calls[role.role]))

    def _step_s(self, role: RolePlan) -> float:
        """Return the seconds that a role computes in a step, or that its host launches if that takes longer."""
        if role.role not in self._computes:
            kind = self._kinds_in(role)[0]
            parts = (p for instr in role.program for p in instr.parts if isinstance(p.op, Compute))
            each = [(w.seconds, w.launch_s) for p in parts for w in (self._part(role, p, kind),)]
            self._computes[role.role] = max(map(sum, zip(*each)), default=0.0)
        return self._computes[role.role]

    def _is_first(self, role: RolePlan, part: Part) -> bool:
        if role.role not in self._calls:
            first: dict[int, int] = {}
            for p in (p for instr in role.program for p in instr.parts if isinstance(p.op, Load)):
                first.setdefault(p.mb, id(p))
            self._calls[role.role] = set(first.values())
        return id(part) in self._calls[role.role]

    def _step(self, op: Compute, kind: int) -> Work:
        chunk = self.plan.chunk(op.variant)
        cost = chunk.steps[op.step].cost
        known = self._known[kind].of_compute(
            op.chunk, op.step, chunk.cost_code(op.step), self.plan.rows
        )
        if known is None and op.step == "R":
            known = self._as_forward(chunk, kind)
        if cost.seconds is not None:
            known = Duration(cost.seconds, "given")
        if known is not None:
            self._provenance.looked_up(chunk, op.step)
            return Work(
                known.seconds * self._longer(chunk, op.step, kind), known.source, flops=cost.flops
            )
        device = self._need(f"step {op.step} of chunk {op.chunk}", kind)
        step = self._runs(chunk, op.step, device)
        took, flops, guessed = self._formula(device, chunk, step, kind)
        self._provenance.computed_step(chunk, op.step, guessed, took.parts)
        return Work(took.seconds, took.source, flops=flops, launch_s=took.launch_s)

    def _with_messages(self, role: RolePlan, op: Compute, kind: int) -> Work:
        """Return the work of a step with the messages inside of it; messages without bytes are not sent."""
        key = op, kind, role.role
        if key not in self._inside:
            device, chunk = self._devices[kind], self.plan.chunk(op.variant)
            step = op.step if device is None else self._runs(chunk, op.step, device)
            kernels, sig = self._steps[op, kind], chunk.steps[step]
            beside = {o.number: o.beside for o in sig.overlaps}
            taken = [
                (
                    c,
                    share * times,
                    self._messages.work(meeting_inside(self.plan, c.axis, role), c.kind, nbytes),
                    self._part_s(op, kind, beside[k]) if k in beside else 0.0,
                )
                for k, c in enumerate(sig.collectives)
                for load, share in (EVEN if sig.experts is None else self.loads)
                for times, nbytes in (messages(c, load, sig.experts, exact=without_places(device)),)
                if times
            ]
            sent = [
                (StepMessages(c.axis, c.kind, 1, w.bytes, w.seconds, min(w.seconds, free)), n)
                for c, n, w, free in taken
            ]
            inside = summed(sent)
            source = min([kernels.source, *(w.source for _, _, w, _ in taken)], key=_TRUST.index)
            if device is not None and not device.synchronous:
                calls = sum([m.count for m in inside]) - spared_launches(device, sig, step)
                kernels = replace(kernels, launch_s=kernels.launch_s + calls * device.launch_s)
                if sig.experts is None:  # no stack runs the messages of experts beside products
                    inside = beside_kernels(device, inside, kernels.seconds)
            seconds = kernels.seconds + sum([m.exposed_s for m in inside])
            nbytes = sum([m.bytes for m in inside])
            self._inside[key] = replace(
                kernels, seconds=seconds, source=source, bytes=nbytes, inside=inside
            )
        return self._inside[key]

    def _part_s(self, op: Compute, kind: int, part: Cost) -> float:
        """Return the seconds of some kernels of a step, as their share in its duration."""
        device, whole = self._devices[kind], self.plan.chunk(op.variant).steps[op.step].cost
        if device is not None:
            share = (
                step_took(device, part, op.step).seconds / step_took(device, whole, op.step).seconds
            )
        else:
            share = part.flops / max(1, whole.flops)
        return share * self._steps[op, kind].seconds

    def _runs(self, chunk: Chunk, step: Step, device: Device) -> Step:
        """Return the step that a device's stack runs for one of a plan: for R the whole F, if it recomputes so."""
        whole = device.stack is not None and device.stack.recomputed == "whole"
        return "F" if whole and step == "R" and chunk.keep == "inputs" else step

    def _formula(
        self, device: Device, chunk: Chunk, step: Step, kind: int
    ) -> tuple[Took, int, tuple[str, ...]]:
        """Return the time of a step under the loads, its FLOPs, and the dtypes whose rate on the device is a guess."""
        cost = chunk.steps[step].cost
        key = (id(cost), step, kind)  # the plan keeps it; equal layers share it
        if key not in self._took:
            guessed = guessed_rates(device, cost)
            if any(lacks_number(device, k) for k in cost.kernels):
                self._provenance.lacked(device)
            self._took[key] = *self._under_loads(device, chunk, step), guessed
        return self._took[key]

    def _under_loads(self, device: Device, chunk: Chunk, step: Step) -> tuple[Took, int]:
        """Return the time of a step under the loads, on average, and its FLOPs."""
        exact = without_places(device)
        runs = [(share, loaded(chunk, step, load, exact=exact)) for load, share in self.loads]
        tooks = [
            (share, step_took(device, run, step))
            for share, run in runs[: None if runs[0][1] is not runs[-1][1] else 1]
        ]
        if len(tooks) == 1:
            return tooks[0][1], runs[0][1].flops
        seconds, launch_s = (
            sum([share * each for (share, _), each in zip(tooks, by_load, strict=True)])
            for by_load in zip(*[(took.seconds, took.launch_s) for _, took in tooks])
        )
        flops = round(sum([share * run.flops for share, run in runs]))
        return replace(tooks[-1][1], seconds=seconds, launch_s=launch_s), flops

    def _longer(self, chunk: Chunk, step: Step, kind: int) -> float:
        """Return how many times as long a measured step takes under the loads as under one of 1."""
        device = self._devices[kind]
        even = loaded(chunk, step, 1.0, exact=without_places(device))
        if (
            self.loads == EVEN
            or even is chunk.steps[step].cost
            or device is None
            or not even.kernels
        ):
            return 1.0
        return (
            self._formula(device, chunk, step, kind)[0].seconds
            / step_took(device, even, step).seconds
        )

    def _as_forward(self, chunk: Chunk, kind: int) -> Duration | None:
        """Return the duration of R if that of F is known: it is to F's as computed durations are."""
        known, device = (
            self._known[kind].of_compute(chunk.id, "F", chunk.cost_code("F"), self.plan.rows),
            self._devices[kind],
        )
        if known is None or device is None:
            return None
        forward, again = (step_took(device, chunk.steps[s].cost, s).seconds for s in ("F", "R"))
        return Duration(known.seconds * again / forward, "interpolated") if forward else None

    def _need(self, what: str, kind: int) -> Device:
        device = self._devices[kind]
        if device is None:
            raise no_duration(what)
        return device

    def _comm(self, op: Comm, part: Part) -> Work:
        return self._messages.work(*self._message(op, part))

    def _message(self, op: Comm, part: Part) -> tuple[Channel, str, int]:
        """Return a message's channel, its kind and its bytes."""
        nbytes = self._traffic.message_bytes(op, part)
        return self.plan.channel(op.channel), message_op(op), nbytes
