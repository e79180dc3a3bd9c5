"""Collect the options of an export, with the parts that are said in the nearest form or cannot be said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from piper_ir.ground.errors import JobError
from piper_ir.tools import count_text


@dataclass
class WrittenOptions:
    """Hold the options of a job in the order in which they are written.

    Attributes:
        options: the values by name; True for an option without a value.
        notes: the parts that Megatron says in the nearest form.
        refused: the parts that it cannot say, each with the nearest that it can.
    """

    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def add(self, name: str, value: Any = True) -> None:
        """Add an option; False and None add nothing."""
        if value is not None and value is not False:
            self.options[name] = value

    def refuse(self, part: str, nearest: str) -> None:
        """Note a part that Megatron cannot do."""
        self.refused.append(f"{part}: Megatron cannot do that; the nearest is {nearest}")

    def near(self, part: str, nearest: str) -> None:
        """Note a part that is written in the nearest form."""
        self.notes.append(f"{part}: {nearest}")

    def text(self, job: str) -> str:
        """Return the options, one a line; raise JobError that names all that cannot be said."""
        if self.refused:
            raise JobError(
                "\n  ".join(
                    [f"{job}: {count_text(len(self.refused), 'part')} cannot be exported"]
                    + self.refused
                )
            )
        lines = (
            f"--{name}" if value is True else f"--{name} {value}"
            for name, value in self.options.items()
        )
        return "".join(f"{line}\n" for line in lines)
