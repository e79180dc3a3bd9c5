"""Make the instructions of a draft as templates: instructions that differ in their microbatch only are made once.

The values that die in an instruction, and their order in a part, may differ between microbatches. So `Drafted` holds
the templates before that is known, and `programs` returns the templates of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise

import numpy as np

from piper_compiler.passes.steps.adder import HeldValues, Scheduled
from piper_compiler.passes.steps.arrays import Flags, Ints, int_array, run_starts, within
from piper_compiler.passes.steps.draft import Draft
from piper_compiler.passes.steps.parts import Made, PartMaker
from piper_compiler.passes.steps.release import Releases, Uses
from piper_compiler.passes.steps.waits import LazyWaits
from piper_ir.fold.timing import Prepared, sweep
from piper_ir.plan.instr_table import InstrTable, InstrTemplate, PartTemplate
from piper_ir.plan.plan import COMPUTE
from piper_ir.program.collectives import HOST_COPIES, TO_HOST
from piper_ir.program.ops import Cast, Collective, Fresh

_Like = int | tuple[int, HeldValues]
"""A node, with the values that it holds in place of states, if any."""

Dying = tuple[tuple[int, int, bool], ...]
"""The shared values that die in an instruction, each as (part, number in microbatch 0, sent).

The value dies after the part; a sent value is freed before the others.
"""


@dataclass(eq=False, slots=True)
class _Template:
    """Hold an instruction in any microbatch, before its frees are known.

    Attributes:
        seconds: canonical duration.
        given: the duration that the plan itself states, if any.
    """

    stream: str
    made: list[Made]
    seconds: float
    given: float | None
    touched: list[tuple[int, int]]
    """The parts, each with the shared values that it writes, then the ones that it reads."""
    aheads: tuple[int, ...] = (0,)
    """The microbatches of its parts, relative to the instruction's."""

    def values(self, ahead: int) -> Iterator[int]:
        """Yield the values that its parts in a microbatch touch, by their numbers for that one."""
        for entry in self.made:
            if entry.part.ahead == ahead:
                for v in (*entry.part.writes, *entry.part.reads, *entry.part.held):
                    yield v - ahead


@dataclass(eq=False, slots=True)
class _Trace:
    """Record the instructions of a microbatch on a role so far.

    Attributes:
        before: the trace without the last of them; None before the first.
        last: the last of them, and how far its parts' microbatch is ahead of its own.
        known: the templates of the plan that end here, by the values that die in them.
        touched: the values that it has touched, in the order of first touch, and how many these are; None until they
            are asked for. Behind them may stand values that a later trace has touched, since a trace shares them with
            the first that follows it.
    """

    before: _Trace | None = None
    last: tuple[_Template, int] | None = None
    known: dict[Dying, int] = field(default_factory=dict)
    touched: tuple[dict[int, int], int] | None = None

    @property
    def order(self) -> Mapping[int, int]:
        """Return the place of each value that it has touched, in the order of first touch."""
        missing: list[_Trace] = []
        trace: _Trace | None = self
        while trace is not None and trace.touched is None:
            missing.append(trace)
            trace = trace.before
        order, length = ({}, 0) if trace is None or trace.touched is None else trace.touched
        for later in reversed(missing):
            if len(order) != length:
                order = dict(islice(order.items(), length))
            if later.last is not None:
                template, ahead = later.last
                for v in template.values(ahead):
                    order.setdefault(v, len(order))
            length = len(order)
            later.touched = order, length
        return order


class Drafted:
    """Hold the templates of a draft, and everything to make the plan from them.

    Attributes:
        used: the template of each instruction.
        mb: its microbatch.
        uses: how instructions use shared values.
        times: the times of a run without frees.
        first_part: the number of each computing instruction's first part.
        instr_of_part: the instruction of each such part.
    """

    def __init__(
        self, scheduled: Scheduled, maker: PartMaker, draft: Draft, spans: Mapping[int, float]
    ) -> None:
        self.graph, self.deps, self.maker, self.draft, self.spans = (
            scheduled.graph,
            scheduled.deps,
            maker,
            draft,
            spans,
        )
        self.held = scheduled.held
        self.count = maker.count
        self._needed: LazyWaits | None = None
        self._parts: dict[_Like, list[Made]] = {}
        self._known: dict[object, _Template] = {}
        self._loaded: set[tuple[str, str, int]] = set()
        lead = int_array([numbers[0] for numbers in draft.tasks])
        self.mb = int_array(self.deps.mb)[lead]
        for k, numbers in enumerate(draft.tasks if spans else ()):
            self.mb[k] = min([self.deps.mb[i] for i in numbers])  # a span joins microbatches
        self.used = self._used(lead.tolist())
        self.instrs = self._instrs()
        many = np.zeros(len(lead), np.int64)
        for template, mine in self.instrs:
            many[mine] = len(template.made) if template.stream == COMPUTE else 0
        self.whole: Flags = np.array(maker.whole, np.bool_)
        self.first_part = run_starts(many)
        self.instr_of_part = np.repeat(np.arange(len(many)), many)
        self.uses = self._uses()
        needed = draft.issue.needed(draft.waits)
        prepared = draft.prepared(needed, draft.issue.waits_of(needed), *draft.scheduled)
        self.times = sweep(prepared, [t.seconds for t in self.used], latency=self.graph.program.hop)

    @property
    def makespan(self) -> float:
        """Return the canonical seconds of a step that frees nothing."""
        return self.times.makespan

    def prepared(self, freed: Releases) -> Prepared:
        """Return the DAG that `piper_ir.fold.timing.prepare` makes of the plan.

        A value is freed by an instruction that starts late enough in the run without frees. So nearly all instructions
        are in the order of their starts there. Of instructions that start together, communication comes first, and
        nodes of the whole step come last.
        """
        waits, whole, draft = self._waits(freed), self.mb < 0, self.draft
        keys = np.array(self.times.start), whole, whole | ~draft.channelled, *draft.scheduled
        return draft.prepared(waits.needed, waits.by_instr, *keys)

    def _waits(self, freed: Releases) -> LazyWaits:
        """Return the waits of the plan, found once."""
        if self._needed is None:
            self._needed = LazyWaits(self.draft.issue, self.draft.waits + freed.waits)
        return self._needed

    def _used(self, leads: list[int]) -> list[_Template]:
        """Return the template of each instruction. `leads` has the first number of each."""
        of, mb, comm = self.deps.of, self.deps.mb, self.deps.comm
        spans, held = self.spans, self.held
        templates: list[_Template] = []
        known = self._known.get
        for numbers, lead in zip(self.draft.tasks, leads, strict=True):
            if comm[lead]:
                templates.append(known(of[lead]) or self._transfer(of[lead]))
                continue
            like: tuple[_Like, ...] = (
                (of[lead],) if len(numbers) == 1 else tuple([of[i] for i in numbers])
            )
            if held:
                like = tuple([(of[i], held[i]) if i in held else of[i] for i in numbers])
            template = None if lead in spans else known(like)
            templates.append(
                template or self._task(like, [mb[i] for i in numbers], spans.get(lead))
            )
        return templates

    def _transfer(self, k: int) -> _Template:
        node = self.deps.nodes[k]
        (transfer,) = self.maker.node(node)
        seconds = self.maker.transfer_seconds(node, transfer.part)
        template = self._known[k] = _Template(
            node.stream, [transfer], seconds, None, [(0, v) for v in transfer.reads]
        )
        return template

    def _task(self, like: tuple[_Like, ...], mbs: list[int], given: float | None) -> _Template:
        """Return an instruction that runs these nodes in these microbatches.

        The first node that reads a source in its microbatch loads it.
        """
        own = min(mbs)
        nodes = [self.deps.nodes[_node_of(one)[0]] for one in like]
        sources = [
            (v, node.role, mb)
            for node, mb in zip(nodes, mbs, strict=True)
            for v in self.maker.sources(node)
        ]
        fresh = dict.fromkeys([source for source in sources if source not in self._loaded])
        self._loaded.update(fresh)
        ahead = tuple([mb - own for mb in mbs])
        key = like, ahead, tuple([(v, role, mb - own) for v, role, mb in fresh]), given
        template = self._known.get(key)
        if template is None:
            template = self._known[key] = self._computing(like, ahead, set(key[2]), given)
            if not sources and given is None:
                self._known[like] = template
        return template

    def _computing(
        self,
        like: tuple[_Like, ...],
        ahead: tuple[int, ...],
        fresh: set[tuple[str, str, int]],
        given: float | None,
    ) -> _Template:
        parts: list[Made] = []
        for one, n in zip(like, ahead, strict=True):
            k, values = _node_of(one)
            node = self.deps.nodes[k]
            for v in self.maker.sources(node):
                if (v, node.role, n) in fresh:
                    fresh.remove((v, node.role, n))
                    parts.append(_ahead(self.maker.load(v, node.role), n))
            if one not in self._parts:
                self._parts[one] = self.maker.node(node, values)
            parts += [_ahead(m, n) for m in self._parts[one]]
        seconds = self.maker.seconds.compute([m.part.op for m in parts]) if given is None else given
        touched = [(k, v) for k, m in enumerate(parts) for v in (*m.writes, *m.reads, *m.part.held)]
        return _Template(COMPUTE, parts, seconds, given, touched, tuple(sorted(set(ahead))))

    def _instrs(self) -> list[tuple[_Template, Ints]]:
        keys = list(map(id, self.used))
        templates = dict(zip(keys, self.used, strict=True))
        number = {key: n for n, key in enumerate(templates)}
        numbers = int_array(map(number.__getitem__, keys))
        order = np.argsort(numbers, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)
        return list(zip(templates.values(), parts, strict=True))

    def _uses(self) -> Uses:
        far = 1 + max([len(template.touched) for template, _ in self.instrs], default=0)
        touched = [[int_array(())], [int_array(())]]
        sent = [[int_array(())], [int_array(())]]
        for template, instrs in self.instrs:
            if not template.touched:
                continue
            shift = np.maximum(self.mb[instrs], 0)
            numbers = int_array([v for _, v in template.touched])[:, None]
            values = numbers + np.where(self.whole[numbers // self.count], 0, shift)
            if template.stream == COMPUTE:
                keys = int_array([part * far + k for k, (part, _) in enumerate(template.touched)])
                touched[0].append(values.ravel())
                touched[1].append((keys[:, None] + self.first_part[instrs] * far).ravel())
            else:
                sent[0].append(values.ravel())
                sent[1].append((np.arange(len(values))[:, None] + instrs * far).ravel())
        (value, at), (carried, by) = (map(np.concatenate, columns) for columns in (touched, sent))
        order, sending = np.argsort(at), np.argsort(by)
        count = len(self.maker.places) * self.count
        return Uses(
            count,
            value[order],
            at[order] // far,
            self.instr_of_part,
            carried[sending],
            by[sending] // far,
        )

    def returns(self) -> tuple[Ints, Ints]:
        """Return the tensors that wait on the host, and the compute after which the memory of each is taken again."""
        values, copies, sources, backs = (
            [int_array(())],
            [int_array(())],
            [int_array(())],
            [int_array(())],
        )
        for template, instrs in self.instrs:
            op = template.made[0].part.op
            if not isinstance(op, Collective) or op.kind not in HOST_COPIES:
                continue
            made, mbs = template.made[0], self.mb[instrs]
            if op.kind == TO_HOST:
                values.append(made.reads[0] + mbs)
                copies.append(made.writes[0] + mbs)
            elif made.reads:  # a copy of parameters comes from a state
                sources.append(made.reads[0] + mbs)
                backs.append(self.draft.compute[np.searchsorted(self.draft.compute, instrs) - 1])
        value, copy, source, back = map(np.concatenate, (values, copies, sources, backs))
        by_source = np.argsort(source)
        return value, back[by_source][np.searchsorted(source[by_source], copy)]

    def buffers(self) -> tuple[Ints, Ints]:
        """Return the buffers for gradients that will be scattered, and the instruction that makes each."""
        values, makers = [int_array(())], [int_array(())]
        for template, instrs in self.instrs:
            for m in template.made if template.stream == COMPUTE else ():
                if isinstance(m.part.op, Fresh) or (isinstance(m.part.op, Cast) and m.reads):
                    v = m.writes[0]
                    values.append(
                        v + np.where(self.whole[v // self.count], 0, np.maximum(self.mb[instrs], 0))
                    )
                    makers.append(instrs)
        return np.concatenate(values), np.concatenate(makers)

    def programs(self, freed: Releases) -> list[InstrTable]:
        """Return the program of each role, with its frees and the waits that these need."""
        values = self.maker.values()
        waits = self._waits(freed)
        final = _Final(self, freed)
        maker, buffer_numbers = self._buffers()
        there: Flags = maker >= 0  # other values are there from the start
        made, numbers = maker[there], buffer_numbers[there]
        mbs = self.mb.tolist()
        tables = []
        for r, (a, b) in enumerate(pairwise(self.draft.offsets)):
            templates, used = final.role(a, b)
            first = tuple(buffer_numbers[maker == -1 - r].tolist())
            buffers = within(made, numbers, a, b)
            columns = waits.of(a, b), within(freed.before, freed.early, a, b), buffers, first
            tables.append(InstrTable(values, templates, used, mbs[a:b], *columns))
        return tables

    def _buffers(self) -> tuple[Ints, Ints]:
        """Find the makers of receive buffers and results of reductions: by buffer, the instruction and the value.

        They are made right after the latest instruction that computes before the receive is posted. Buffers that are
        there before the first such instruction of role r have -1 - r in its place.
        """
        draft = self.draft
        user, value = [int_array(())], [int_array(())]
        for template, instrs in self.instrs:
            for v in template.made[0].writes if template.stream != COMPUTE else ():
                user.append(instrs)
                value.append(v + np.maximum(self.mb[instrs], 0))
        users, values = np.concatenate(user), np.concatenate(value)
        order = np.argsort(users, kind="stable")
        users, values = users[order], values[order]
        latest = draft.compute[np.searchsorted(draft.compute, users) - 1]
        roles = np.searchsorted(int_array(draft.offsets), users, side="right") - 1
        return np.where(draft.computed[users] > 0, latest, -1 - roles), values


class _Final:
    """Make the templates of the plan: the drafted ones, with the frees of each part."""

    def __init__(self, drafted: Drafted, freed: Releases) -> None:
        self.drafted = drafted
        self.dying = self._dying(freed)

    def _dying(self, freed: Releases) -> list[Dying]:
        """Return the values that die in each instruction that computes."""
        d = self.drafted
        instr = d.instr_of_part[freed.after]
        part = freed.after - d.first_part[instr]
        number = freed.freed - np.where(
            d.whole[freed.freed // d.count], 0, np.maximum(d.mb[instr], 0)
        )
        sent = np.isin(freed.freed, d.uses.sent)
        flat = list(zip(part.tolist(), number.tolist(), sent.tolist(), strict=True))
        ends = np.searchsorted(instr, np.arange(len(d.used) + 1)).tolist()
        return [tuple(flat[a:b]) for a, b in pairwise(ends)]

    def role(self, a: int, b: int) -> tuple[list[InstrTemplate], list[int]]:
        """Return the templates of a role's instructions a to b, and which each uses."""
        made = _RoleTemplates()
        start, traces, then = made.start, made.traces, made.then
        numbers: list[int] = []
        transfers: dict[int, int] = {}
        mbs = self.drafted.mb[a:b].tolist()
        for template, mb, dying in zip(self.drafted.used[a:b], mbs, self.dying[a:b], strict=True):
            if template.stream != COMPUTE:
                number = transfers.get(id(template))
                if number is None:
                    number = transfers[id(template)] = made.add(template, {}, ())
                numbers.append(number)
                continue
            if mb < 0 or template.aheads != (0,):
                numbers.append(made.joining(template, mb, dying))
                continue
            before = traces.get(mb, start)
            key = id(before), id(template), 0
            trace = traces[mb] = then.get(key) or made.after(before, template, 0)
            number = trace.known.get(dying)
            if number is None:
                number = trace.known[dying] = made.add(template, {0: trace}, dying)
            numbers.append(number)
        return made.templates, numbers


class _RoleTemplates:
    """Collect the templates of a role's instructions.

    Attributes:
        start: the trace before the first instruction.
        traces: by microbatch, its trace so far.
        then: the traces by the one before and the template: a trace that held the next would never be freed.
    """

    def __init__(self) -> None:
        self.templates: list[InstrTemplate] = []
        self.start, self.traces = _Trace(), dict[int, _Trace]()
        self.then: dict[tuple[int, int, int], _Trace] = {}
        self._known: dict[object, int] = {}
        self._kinds: dict[int, int] = {}
        self._numbers: dict[tuple[int, _FreesOfParts], int] = {}

    def after(self, before: _Trace, template: _Template, ahead: int) -> _Trace:
        """Return the trace after the parts of an instruction whose microbatch is `ahead` of the instruction's."""
        trace = self.then.get((id(before), id(template), ahead))
        if trace is None:
            trace = self.then[id(before), id(template), ahead] = _Trace(before, (template, ahead))
        return trace

    def add(self, template: _Template, traces: Mapping[int, _Trace], dying: Dying) -> int:
        """Add a template with the frees of its parts unless it is there, and return its number."""
        same = id(template), dying
        number = self._known.get(same)
        if number is None:
            kind = self._kinds.setdefault(id(template), len(self._kinds))
            key = kind, _frees(template, traces, dying)
            number = self._numbers.setdefault(key, len(self.templates))
            if number == len(self.templates):
                self.templates.append(_with_frees(template, *key))
            if not any([entry.inside for entry in template.made]):  # its traces order nothing
                self._known[same] = number
        return number

    def joining(self, template: _Template, mb: int, dying: Dying) -> int:
        """Return the number of a template that computes and joins microbatches, or is of none."""
        own_traces: list[_Trace] = []
        for n in template.aheads if mb >= 0 else ():
            before = self.traces.get(mb + n, self.start)
            trace = self.traces[mb + n] = self.after(before, template, n)
            own_traces.append(trace)
        key = id(template), dying, *map(id, own_traces)
        number = self._known.get(key)
        if number is None:
            traces = dict(zip(template.aheads, own_traces, strict=False))
            number = self._known[key] = self.add(template, traces, dying)
        return number


def _node_of(one: _Like) -> tuple[int, HeldValues]:
    return one if isinstance(one, tuple) else (one, ())


def _ahead(made: Made, n: int) -> Made:
    """Return a part moved by n microbatches."""
    if not n:
        return made
    part = made.part
    reads, writes, *others = [
        tuple([v + n for v in vs])
        for vs in (part.reads, part.writes, made.reads, made.writes, made.inside)
    ]
    return Made(replace(part, reads=reads, writes=writes, ahead=n), *others)


_FreesOfParts = tuple[tuple[int, ...], ...]
"""The values that each part of an instruction frees."""


def _frees(template: _Template, traces: Mapping[int, _Trace], dying: Dying) -> _FreesOfParts:
    """Return the values that die in each part: the sent ones first, then the others by first use."""
    frees: list[tuple[int, ...]] = []
    for k, entry in enumerate(template.made):
        own = [(v, is_sent) for number, v, is_sent in dying if number == k]
        others = [*entry.inside, *[v for v, is_sent in own if not is_sent]]
        if entry.inside and len(others) > 1:
            order, ahead = traces[entry.part.ahead].order, entry.part.ahead
            others.sort(key=lambda v: order[v - ahead])
        frees.append((*[v for v, is_sent in own if is_sent], *others))
    return tuple(frees)


def _with_frees(template: _Template, kind: int, frees: _FreesOfParts) -> InstrTemplate:
    """Return an instruction whose parts free these values."""
    parts = []
    for entry, own in zip(template.made, frees, strict=True):
        part = entry.part
        if own:  # `replace` of dataclasses takes four times as long
            part = PartTemplate(
                part.node, part.tail, part.op, part.reads, part.writes, own, part.ahead, part.held
            )
        parts.append(part)
    return InstrTemplate(template.stream, tuple(parts), template.given, kind)
