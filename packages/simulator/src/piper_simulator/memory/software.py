"""Count the memory that is held beside a plan's tensors: a software stack's buffers, and the pool of a CUDA graph.

The stack says which buffers it has (`Stack.holds`, `Stack.workspaces`, `Stack.grouped_workspaces`, `Stack.loss_keeps`),
and which tensors it keeps in another size than the plan (`kept_tensors`), so that the bytes beside can be negative. The
tensors of a CUDA graph are in a pool of its own, as large as the peak of its instructions, which end before the update
(`piper_runtime.engine.cuda_graphs`). So temporaries of the update come on top of that peak.
"""

from __future__ import annotations

from collections.abc import Sequence

from piper_ir.fold.memory import RoleMemory, Usage
from piper_ir.ground.sizes import ITEM_BYTES, bind
from piper_ir.plan.instr_table import PartTemplate
from piper_ir.plan.plan import Plan, RolePlan
from piper_ir.program.ops import Compute, Update
from piper_simulator.cluster.stacks import Stack
from piper_simulator.durations.eager_launches import SLICE
from piper_simulator.memory.kept_tensors import kept_by


class HeldBeside:
    """Count the bytes beside a role's tensors, at any time and while the loss runs."""

    def __init__(self, plan: Plan, role: RolePlan, stack: Stack | None) -> None:
        self._plan, self._role, self._stack = plan, role, stack
        self._at_loss: dict[Compute, int] = {}
        self.always = 0 if stack is None else self._buffers(stack)
        self._captured = _captured_peak(plan, role) if plan.cuda_graph else 0
        kept = kept_by(stack, plan, role)
        self._otherwise: dict[int, int] = {}
        if kept is not role:
            of_plan, own = (RoleMemory(plan, one).moments() for one in (role, kept))
            both = zip(of_plan, own, strict=True)
            self._otherwise = {instr: here - there for (instr, there), (_, here) in both}

    def _buffers(self, stack: Stack) -> int:
        """Return the bytes of the buffers that live through the step, less shards that the plan alone keeps."""
        less = _cast_shards(self._plan, self._role) if stack.shards == "cast" else 0
        own = {op.variant for op in self._role.table.ops if isinstance(op, Compute)}
        chunks = [c for c in (*self._plan.chunks, *self._plan.variants) if c.variant in own]
        forward = [k for chunk in chunks for k in chunk.steps["F"].cost.kernels]
        grouped = any(k.rows_dim is not None for k in forward)
        libraries = stack.workspaces + (stack.grouped_workspaces if grouped else 0)
        # a softmax reads and writes them
        scores = [bind(k.bytes, 0) // 2 for k in forward if k.op == "_softmax"]
        steps = [
            (any(k.kind == "loss" for k in chunk.steps["F"].cost.kernels), chunk.steps["W"].cost)
            for chunk in chunks
            if "W" in chunk.steps
        ]
        weights = [
            (of_loss, [bind(k.dims[0], 0) * bind(k.dims[1], 0) * k.count for k in cost.kernels
                       if k.kind == "matmul" and len(k.dims) == 3])
            for of_loss, cost in steps
        ]  # fmt: skip
        layer = max((sum(sizes) for of_loss, sizes in weights if not of_loss), default=0)
        head = max((max(sizes, default=0) for of_loss, sizes in weights if of_loss), default=0)
        sizes = {
            "layer gradients": 2 * layer,
            "head gradient": 4 * head,
            "scores": max(scores, default=0),
        }
        return round(libraries) - less + sum(sizes[name] for name in stack.holds)

    def at(self, instr: int, nbytes: int) -> int:
        """Return the bytes beside a moment of the role: an instruction, -1 for the start, and the bytes held there."""
        more = self.always + self._otherwise.get(instr, 0)
        if self._captured and instr >= 0:
            more += self._unused(instr, nbytes)
        if self._stack is not None and self._stack.loss_keeps and instr >= 0:
            ops = [p.op for p in self._parts(instr)]
            more += max((self._logits(op) for op in ops if isinstance(op, Compute)), default=0)
        return more

    def _parts(self, instr: int) -> Sequence[PartTemplate]:
        table = self._role.table
        return table.templates[table.used[instr]].parts

    def _unused(self, instr: int, nbytes: int) -> int:
        """Return the bytes of a graph's pool that the plan does not hold while the optimizer runs."""
        updates = [p.op for p in self._parts(instr) if isinstance(p.op, Update)]
        if not updates:
            return 0
        return max(0, self._captured - (nbytes - sum(op.workspace for op in updates)))

    def _logits(self, op: Compute) -> int:
        """Return the bytes that the stack holds beside the loss of a step; 0 for one without a loss.

        Its loss does not work in slices, of which the plan holds one in float32.
        """
        assert self._stack is not None
        if op not in self._at_loss:
            kernels = [
                k
                for k in self._plan.chunk(op.variant).steps[op.step].cost.kernels
                if k.kind == "loss" and len(k.dims) == 2
            ]
            logits = max((bind(k.dims[0], 0) * bind(k.dims[1], 0) for k in kernels), default=0)
            slice_bytes = ITEM_BYTES["float32"] * min(logits, SLICE)
            self._at_loss[op] = round(logits * self._stack.loss_keeps) - slice_bytes
        return self._at_loss[op]


def _cast_shards(plan: Plan, role: RolePlan) -> int:
    """Return the bytes of a rank's shards of parameters, beside which it has masters in another dtype."""
    params = [s for s in role.states if s.category == "param" and not s.host]
    buckets = [(s, plan.bucket(s.name)) for s in params]
    return sum([s.nbytes for s, bucket in buckets if bucket.mastered and bucket.shard.params])


def _captured_peak(plan: Plan, role: RolePlan) -> int:
    """Return the most bytes that a role holds in an instruction before its first update."""
    table = role.table
    ends = [any(isinstance(p.op, Update) for p in t.parts) for t in table.templates]
    first = next((i for i, k in enumerate(table.used) if ends[k]), len(table.used))
    moments = RoleMemory(plan, role).moments()
    return max((nbytes for instr, nbytes in moments if instr < first), default=0)


def fullest_moment(memory: RoleMemory, beside: HeldBeside) -> tuple[Usage, int]:
    """Return a role's peak, and the bytes that its fullest moment with the software has more, or fewer."""
    moments = list(memory.moments())
    if not moments:
        return memory.peak(), 0
    fullest, total = max(moments, key=lambda moment: moment[1])
    held = max([nbytes + beside.at(instr, nbytes) for instr, nbytes in moments])
    return memory.at(fullest), held - total


def software_buffers(plan: Plan, role: RolePlan, stack: Stack | None) -> int:
    """Return the bytes that a stack adds to the peak of a role, at the role's fullest moment under that stack."""
    other = stack is not None and (
        stack.holds
        or stack.workspaces
        or stack.grouped_workspaces
        or stack.loss_keeps
        or stack.keeps_otherwise
        or stack.shards == "cast"
    )
    if not other and not plan.cuda_graph:
        return 0
    return fullest_moment(RoleMemory(plan, role), HeldBeside(plan, role, stack))[1]
