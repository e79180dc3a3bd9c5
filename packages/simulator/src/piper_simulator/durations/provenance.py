"""Collect the sources of durations for the user: unmeasured constants, guesses, and costs that do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from piper_ir.plan.plan import Plan
from piper_ir.program.costs import Costs
from piper_ir.program.program import Chunk, Step
from piper_ir.tools import machine_name
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.cluster.device import CPU, Device
from piper_simulator.cluster.kernel_table import REACH, How
from piper_simulator.cluster.network import SlowLink

_KERNELS: Mapping[How, str] = {
    "table": "as measured",
    "interpolated": "between measured sizes",
    "scaled": f"up to {REACH:g} times outside of them, by formula times measured / formula of the nearest",
    "formula": "by formula",
}
GRAPHS = (
    "steps are predicted as CUDA graphs, which no device has run yet: kernels before the update wait for no launch, "
    "unless their durations were measured so"
)
NAMED = 3
"""The number of items that a sentence names before it only counts the others."""


class Provenance:
    """Record the origin of a cost model's durations and the ones that it lacks, and describe them in sentences."""

    def __init__(self, plan: Plan, cluster: Cluster | None, costs: Costs) -> None:
        self._plan, self._cluster, self._costs = plan, cluster, costs
        self._dtypes: dict[str, None] = {}
        self._unknown: dict[str, None] = {}  # chunks that the costs do not know
        self._far: dict[str, None] = {}  # chunks that they know at too different rows
        self._beyond: dict[str, None] = {}  # interpolated outside of the measured sizes
        self._messages: dict[str, None] = {}  # that the costs do not know
        self._slow: dict[str, None] = {}
        self._lacking: dict[str, None] = {}  # sentences on stacks without a number
        self._links: dict[str, None] = {}  # slow ones that messages cross
        self._kernels: dict[How, float] = dict.fromkeys(
            _KERNELS, 0.0
        )  # seconds, each step of a chunk once
        self._computed = False

    def looked_up(self, chunk: Chunk, step: Step) -> None:
        """Record that the duration of a step came from the costs."""
        rows, measured = self._plan.rows, self._costs.rows_of(chunk.cost_code(step), step)
        if (
            measured
            and not measured[0] <= rows <= measured[-1]
            and chunk.id not in self._costs.compute
        ):
            self._beyond[f"{rows} rows (measured {measured[0]} to {measured[-1]})"] = None

    def computed_step(
        self, chunk: Chunk, step: Step, guessed: Iterable[str], parts: Mapping[How, float]
    ) -> None:
        """Record that the duration of a step was computed.

        `guessed` are dtypes with another dtype's rate; `parts` are the seconds of its kernels by source.
        """
        self._computed = True
        for how, seconds in parts.items():
            self._kernels[how] += seconds
        self._dtypes.update(dict.fromkeys(guessed))
        (self._far if self._costs.rows_of(chunk.cost_code(step), step) else self._unknown)[
            chunk.id
        ] = None

    def lacked(self, device: Device) -> None:
        """Record that a device's stack has no number for an attention kernel that runs there."""
        stack = device.stack
        assert stack is not None, "without a stack all kernels have the device's own rates"
        what = (
            f"{device.generation} devices"
            if device.generation
            else "devices without a `generation` in their file"
        )
        self._lacking[
            f"{device.name}: the stack {stack.name} has no number for its attention kernel {stack.attention} on "
            f"{what}; attention counts as a matrix product"
        ] = None

    def computed(self) -> None:
        """Record that the duration of another op was computed."""
        self._computed = True

    def slowed(self, role: str, ranks: Mapping[int, float]) -> None:
        """Record that these ranks of a role are slow; a role takes as long as the slowest of its ranks."""
        for rank, factor in sorted(ranks.items()):
            self._slow[f"rank {rank} of {role}, {factor:g} times as long"] = None

    def crossed(self, links: Iterable[SlowLink]) -> None:
        """Record that messages cross these links."""
        for x in links:
            where = f"within node {x.a}" if x.a == x.b else f"nodes {x.a} and {x.b}"
            self._links[f"{where}, {x.factor:g} times as long"] = None

    def sent(self, op: str, nbytes: int, group: int, nodes: int) -> None:
        """Record that the duration of a message came from the costs."""
        measured = self._costs.bytes_of(op, group, nodes)
        if nbytes > measured[-1]:
            self._beyond[f"{op} of {nbytes} bytes (measured up to {measured[-1]})"] = None

    def sent_unknown(self, op: str, nbytes: int, group: int, nodes: int) -> None:
        """Record that the duration of a message was computed."""
        self._computed = True
        if self._costs.comm:
            where = f" on {nodes} nodes" if nodes > 1 else ""
            self._messages[f"{op} of {nbytes} bytes over {group} ranks{where}"] = None

    def notes(self) -> tuple[str, ...]:
        """Return a sentence for each kind of record."""
        cluster, host = self._cluster, self._costs.host
        assumed = (
            cluster.warnings if cluster is not None and (self._computed or host is None) else ()
        )
        guesses = () if cluster is None else tuple(cluster.guess(d) for d in self._dtypes)
        slow = [
            f"slow {what}: {_some(slow_parts)}"
            for what, slow_parts in (("ranks", self._slow), ("links", self._links))
            if slow_parts
        ]
        return (
            *assumed,
            *guesses,
            *self._lacking,
            *slow,
            *self._of_graphs(),
            *self._of_machine(),
            *self._of_kernels(),
            *self._of_chunks(),
        )

    def _of_graphs(self) -> list[str]:
        """Return a sentence on steps that are CUDA graphs, if durations are computed."""
        return [GRAPHS] if self._plan.cuda_graph and self._computed else []

    def _of_kernels(self) -> list[str]:
        """Return a sentence on how much of the kernels' time comes from a table, if there is one."""
        total = sum(self._kernels.values())
        if self._cluster is None or not self._cluster.device.kernels or not total:
            return []
        shares = (
            f"{seconds / total:.0%} {_KERNELS[how]}"
            for how, seconds in self._kernels.items()
            if seconds
        )
        return [f"{self._cluster.name}: of the time of kernels {', '.join(shares)}"]

    def _of_machine(self) -> list[str]:
        """Return a sentence if the costs are of another cluster or machine, or of another number of ranks at once."""
        origin, cluster = self._costs.origin, self._cluster
        if origin is None:
            return []
        sentences = []
        if cluster is not None and cluster.name != origin.cluster:
            sentences.append(
                f"the costs were measured on {origin.cluster} ({origin.device}), and this is {cluster.name}"
            )
        elif (
            cluster is not None
            and cluster.name == CPU
            and origin.device != (here := machine_name())
        ):
            sentences.append(
                f"the costs were measured on another machine: {origin.device}; this is {here}"
            )
        if origin.ranks != self._plan.mesh.world and (cluster is None or cluster.synchronous):
            sentences.append(
                f"the costs were measured while {origin.ranks} ranks computed at once; the plan has "
                f"{self._plan.mesh.world}, which share what the machine has"
            )
        return sentences

    def _of_chunks(self) -> list[str]:
        """Return sentences on steps that the costs do not hold, or not at this size; none without any measured step."""
        sentences = []
        if self._costs.steps and len(self._unknown) == len(self._plan.chunks):
            origin = self._costs.origin
            whose = f" (program {origin.program}, {origin.date})" if origin is not None else ""
            sentences.append(
                f"the costs{whose} are of another model: none of the {len(self._unknown)} chunks has a cost, all "
                f"are computed by formula: {_some(self._unknown)}; profile this model, or leave the costs out"
            )
        elif self._costs.steps and self._unknown:
            sentences.append(
                f"{len(self._unknown)} of {len(self._plan.chunks)} chunks have no cost and are computed by "
                f"formula: {_some(self._unknown)}"
            )
        if self._far:
            sentences.append(
                f"{self._plan.rows} rows per microbatch were not measured; durations are interpolated between two measured "
                f"numbers of rows, and up to a factor of 2 beyond; computed by formula: {_some(self._far)}"
            )
        if self._beyond:
            sentences.append(f"interpolated beyond what was measured: {_some(self._beyond)}")
        if self._messages:
            sentences.append(f"not in the costs, computed by formula: {_some(self._messages)}")
        return sentences


def _some(names: Iterable[str]) -> str:
    """Return the first few names, and how many more there are."""
    every = list(names)
    more = len(every) - NAMED
    return ", ".join(every[:NAMED]) + (f" and {more} more" if more > 0 else "")
