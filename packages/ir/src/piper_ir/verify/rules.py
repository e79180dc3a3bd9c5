"""List the rules of a plan in one table, and the messages for broken ones; the other modules here check them."""

from __future__ import annotations

from dataclasses import dataclass, field

from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.plan import Category, Instr, Part, Plan, RolePlan
from piper_ir.program.ops import Compute, op_name

RULES: dict[str, str] = {
    # form
    "R01-ranks": "the roles' ranks are those at their placed coordinates and divide the mesh: each "
    "rank has one role",
    "R02-streams": 'a role lists each of its streams once, "compute" among them, and every '
    "instruction stands on one of them",
    "R03-parts": "a communication is one part alone, on a stream other than compute; everything "
    "else stands on compute",
    "R04-allocation": "only instructions of the compute stream allocate and free",
    "R05-waits": "a wait names a stream of the role, and instructions that stand earlier in program order",
    "R06-names": "ids are unique, and every value, chunk, channel, bucket, parameter and tensor "
    "that is named exists",
    "R07-signature": "what a part reads and writes agrees in number, shape and dtype with its op or chunk, and a "
    "chunk's inputs with what they name; mb is in range, and ops of the whole step have none",
    "R08-states": "a role owns the state of each parameter, buffer and bucket that it uses, once, "
    "with the right bytes",
    "R09-channels": "p2p joins two roles that place the same axes, a group joins different roles; compute is for "
    "steps alone",
    "R10-channel-use": "an op suits its channel's kind and its role's side of it, and stands on the channel's one "
    "stream there",
    # values
    "R11-written-once": "a value is written exactly once, and used on the role that writes it only",
    "R12-allocated": "what a communication writes is allocated once, before it, by an instruction that it waits for",
    "R13-read-after-write": "a value is read after it is written; on another stream, waits guarantee it",
    "R14-freed-once": "a value is freed exactly once: no leak at the end of the step, no double free",
    "R15-use-after-free": "no instruction reads or writes a value that an instruction before it freed",
    "R16-free-covered": "who frees a value has waited for every communication that uses it",
    "R29-spoiled": "what a collective leaves undefined (COLLECTIVES) is read by nothing else that does not come "
    "before it",
    # communication
    "R17-p2p-match": "on each p2p channel the n-th send and the n-th receive exist and carry the "
    "same shape and dtype",
    "R18-group-match": "on each group channel all members run the same collectives (kind; bucket or shape, dtype) "
    "in one order",
    "R19-deadlock": "the plan runs to its end: streams in order, waits, rendezvous, one issuing thread per role "
    "that computes",
    "R20-issue-order": "the plan also runs to its end with each rank's communications one by one in program order, "
    "as on NCCL; copies to the host and back are apart",
    # training
    "R21-steps": "each non-empty F, I, W of a chunk runs once per microbatch on one role, in this order; buffers "
    "change in order",
    "R22-buckets": "parameters of a bucket have its dtype; gradients start at multiples of 256 bytes, in order, "
    "apart, inside",
    "R23-holders": "a trained parameter is in one bucket, held by just the roles that use it, reduced over all "
    "their ranks",
    "R24-reduction": "a bucket that several ranks hold is all-reduced once per step on each, after its last "
    "accumulation",
    "R25-update": "a bucket is updated once on each role that holds it, after its reduction and the last use of "
    "its params",
    "R26-scale": "loss gradients start from 1/(microbatches*replicas) for a mean, else 1; a sum has weighted "
    "updates; one clip",
    "R27-dataflow": "a step reads what its chunk asks: that output of that microbatch, exchanged once between "
    "experts and the rest, and summed up once where devices hold terms; a tangent sums its "
    "consumers' gradients",
    "R30-shards": "ranks share a bucket's states along axes of its replication, in equal parts of whole 256 bytes; "
    "each role has channels among just the sharers",
    "R31-gathered": "who reads a parameter that ranks share holds a value gathered from its bucket, or follows its "
    "gather",
    "R32-contributions": "who adds to gradients that ranks share adds to one buffer, which is scattered after the "
    "last who adds, and folded once",
    "R33-recompute": "a chunk follows one policy in a microbatch; R reads what its F read; one of the two writes "
    "each saved port, and F none that no step reads",
    "R34-accumulation": "in a microbatch, a chunk adds once to the gradient of each of its "
    "parameters that wants one",
    # devices that share chunks
    "R35-parts": "sharers of a chunk run one role with the same rows; parameters have equal parts along axes of "
    "sharers alone, and those of a bucket along the same, with gradients that are terms of a sum "
    "along the same",
    "R36-inside": "steps meet along axes of sharers, on a channel of their role that joins just the ranks there; a "
    "forward that reads parts meets along their axes or hands on terms of sums, and equal code in "
    "the same way; a step computes beside one of its collectives at a time, with kernels of its own",
    "R37-experts": "devices with different experts have rows of their own; chunks of experts alone have parts of "
    "parameters there, and tokens go to them and back by an all-to-all among just those devices of "
    "a role",
    # memory of the host
    "R38-host": "a value of the host is written by ToHost alone and read by FromHost alone, which brings it back, each "
    "by one rank; nothing that computes reads the original after its copy, in program order",
    # memory
    "R28-peak": "peak_bytes, peak_at, peak_by_category and host_peak_bytes are those of a scan in program order, and "
    "an update states the bytes of its copies on the host",
}
"""The promise of each rule, by its name. Later groups are checked only when the earlier ones hold."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Describe a broken rule.

    Attributes:
        role: the role whose fault it is; "" when it is no single role's.
        index: the instruction whose fault it is; -1 when it is no single instruction's.
    """

    rule: str
    message: str
    role: str = ""
    index: int = -1

    def __str__(self) -> str:
        gap = "\n" if "\n" in self.message else " "
        return f"{self.rule}: {self.message}{gap}(the rule: {RULES[self.rule]})"


@dataclass(slots=True)
class Findings:
    """Collect the violations of one plan in the order in which they are found."""

    plan: Plan
    violations: list[Violation] = field(default_factory=list)
    _kinds: dict[str, tuple[TensorSpec, Category]] | None = None

    @property
    def kinds(self) -> dict[str, tuple[TensorSpec, Category]]:
        """Return the spec and category of every value, as a dict, which is the fastest to ask."""
        if self._kinds is None:
            self._kinds = self.plan.kinds.as_dict()
        return self._kinds

    def add(self, rule: str, message: str, role: RolePlan | None = None, index: int = -1) -> None:
        """Add a violation of a rule, with the role and the instruction whose fault it is."""
        assert rule in RULES, rule
        if role is None:
            self.violations.append(Violation(rule, message))
        else:
            place = instr_text(role, index) if index >= 0 else role_text(role)
            self.violations.append(Violation(rule, f"{place}: {message}", role.role, index))


def role_text(role: RolePlan) -> str:
    """Return a text such as "role pp0 (ranks 0, 1)"; long lists of ranks are shortened."""
    ranks = [str(r) for r in role.ranks]
    if len(ranks) > 4:
        ranks = [*ranks[:2], "...", ranks[-1]]
    return f"role {role.role} (rank{'s' if len(role.ranks) != 1 else ''} {', '.join(ranks)})"


def instr_text(role: RolePlan, index: int) -> str:
    """Return a text such as "role pp0 (ranks 0, 1), instruction 12 on compute: layer0.F@3"."""
    return (
        f"{role_text(role)}, instruction {index} on {role.program[index].stream}: "
        f"{instr_title(role.program[index])}"
    )


def instr_title(instr: Instr) -> str:
    """Return the node of the first chunk, else of the first part, with the number of further parts: "layer0.F@3+1"."""
    if not instr.parts:
        return "(no parts)"
    main = next((p for p in instr.parts if isinstance(p.op, Compute)), instr.parts[0])
    return main.node + (f"+{len(instr.parts) - 1}" if len(instr.parts) > 1 else "")


def part_name(part: Part) -> str:
    """Return the op and the node of a part."""
    return f"{op_name(part.op)} {part.node}"
