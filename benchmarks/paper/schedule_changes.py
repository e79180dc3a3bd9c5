"""Change one assumption of the paper's schedules at a time, to what the artifact of the paper or its machine has.

Each row of the table simulates the same schedules again, so that it says how much an assumption is worth. Some rows
change several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.paper.schedule_lines import MESHES, RATIOS, STACKS, Line, Setup, lines, ratio

EFA = 0.94 * 4 * 12.5e9 / 8
"""Bytes/s of a device on a node with four NICs of 100 Gb/s for eight devices, at the usable part of a NIC (SimAI)."""


@dataclass(frozen=True)
class Change:
    """Say what is assumed instead.

    Attributes:
        what: in words.
        source: where it is from.
        fields: of a `Setup`.
        stack: the kernels.
        schedule: the one of a single mesh.
    """

    what: str
    source: str
    fields: tuple[tuple[str, Any], ...] = ()
    stack: str = STACKS[0]
    schedule: str = "DualPipeV"


BF16, WHOLE, NIC, APART = (
    ("precision", "bfloat16"),
    ("whole", True),
    ("nic", EFA),
    ("shared", False),
)
DROPLESS, TIGHT = ("bound", 1.25), ("bound", 1.0)
UNBOUND = Change("dropless experts, bound 1.25", "the paper; the bound is our default", (DROPLESS,))
"""The row of dropless experts, with nothing else changed."""
MEAN = Change(
    "dropless experts, bound 1.0", "the paper; the least that a load of 1.0 needs", (TIGHT,)
)
"""The same with as many places as rows come on average."""
CHANGES = (
    Change("nothing", "-"),
    Change(
        "kernels of `inductor`",
        "the default of the artifact's example: test_qwen.py, --use-inductor",
        stack="inductor",
    ),
    Change(
        "gradients and AdamW's states in bfloat16, no masters",
        "test_qwen.py: model_dtype, torch.optim.Adam",
        (BF16,),
    ),
    Change(
        "a node has all stages of one replica",
        "coordinator.py, e2e_eval.py: backend_layout",
        (WHOLE,),
    ),
    Change(
        "NICs of EC2's p4d: 4 x 100 Gb/s for 8 devices",
        "e2e_eval.py: AWS; its A100 of 40 GB",
        (NIC,),
    ),
    Change("bfloat16, one replica on a node", "both above", (BF16, WHOLE)),
    Change("bfloat16, one replica on a node, p4d", "all three above", (BF16, WHOLE, NIC)),
    UNBOUND,
    MEAN,
    Change("dropless, bound 1.25; bfloat16", "the paper; test_qwen.py", (DROPLESS, BF16)),
    Change(
        "dropless, bound 1.25; one replica on a node",
        "the paper; coordinator.py",
        (DROPLESS, WHOLE),
    ),
    Change(
        "dropless, bound 1.25; bfloat16, one replica on a node",
        "the paper; both files",
        (DROPLESS, BF16, WHOLE),
    ),
    Change(
        "dropless, bound 1.25; bfloat16, one replica on a node, p4d",
        "the paper; all three",
        (DROPLESS, BF16, WHOLE, NIC),
    ),
)


@dataclass(frozen=True)
class Changed:
    """Hold what a change makes of the schedules.

    Attributes:
        ratios: in the order of `RATIOS`.
        fits: whether all plans do.
        lines: the schedules.
    """

    change: Change
    ratios: tuple[float, ...]
    fits: bool
    lines: tuple[Line, ...] = ()

    @property
    def apart(self) -> tuple[float, ...]:
        """Return how far each ratio is from the published one, in points."""
        return tuple([abs(ours - p.percent) for ours, p in zip(self.ratios, RATIOS, strict=True)])


def changed(found: Sequence[Setup], changes: Sequence[Change] = CHANGES) -> Iterator[Changed]:
    """Yield what each change makes of these setups."""
    for change in changes:
        own = [replace(setup, **dict(change.fields)) for setup in found]
        every = tuple(lines(own, change.stack))
        yield Changed(
            change,
            tuple([ratio(every, p) for p in RATIOS]),
            all(x.found.fits for x in every),
            every,
        )


RATES = (
    Change("nothing: DualPipeV, experts shared, as in the table above", "-", (), MESHES),
    Change(
        "kernels of `eager`, as in the section before",
        "e2e_eval.py, which compiles only when asked",
        (),
        STACKS[0],
    ),
    Change("dropless experts, bound 1.25", "the paper", (DROPLESS,), MESHES),
    Change("the same, kernels of `eager`", "the paper; e2e_eval.py", (DROPLESS,), STACKS[0]),
    Change(
        "dropless, bfloat16, one replica on a node",
        "the paper; test_qwen.py, coordinator.py",
        (DROPLESS, BF16, WHOLE),
        MESHES,
    ),
    Change("bfloat16", "test_qwen.py", (BF16,), MESHES),
    Change(
        "bfloat16, one replica on a node", "test_qwen.py, coordinator.py", (BF16, WHOLE), MESHES
    ),
    Change(
        "the same, 1F1B, each device has all experts",
        "e2e_eval.py: scalability",
        (BF16, WHOLE, APART),
        MESHES,
        "1F1B",
    ),
    Change(
        "the same, p4d", "e2e_eval.py: scalability, AWS", (BF16, WHOLE, APART, NIC), MESHES, "1F1B"
    ),
)


def rates(found: Setup, changes: Sequence[Change] = RATES) -> Iterator[tuple[Change, Line]]:
    """Yield a mesh under each of the assumptions."""
    for change in changes:
        setup = replace(found, **dict(change.fields))
        yield (
            change,
            Line(
                setup,
                change.schedule,
                setup.simulated(setup.schedule(change.schedule), change.stack),
            ),
        )
