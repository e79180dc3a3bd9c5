"""Hold a job of another system as that system says it: its options, each with its value and where it was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from reprlib import Repr
from typing import Any

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
_SHORT.maxlist = _SHORT.maxdict = 20


@dataclass(frozen=True)
class OptionValue:
    """Hold the value of one option.

    Attributes:
        value: as the system's parser has it: a number, a text, a truth value, None, a list or a mapping.
        origin: where it was written, such as "pretrain.sh:12"; "" for a default.
        default: whether the system's own default stands.
    """

    value: Any
    origin: str = ""
    default: bool = False

    @property
    def text(self) -> str:
        """Return the value for a message, long ones without their middle."""
        return _SHORT.repr(self.value)


@dataclass(frozen=True)
class Foreign:
    """Hold a job as another system's parser resolves it.

    Attributes:
        system: the system's name, such as "megatron".
        version: of the system, as far as it is known; "" if it is not.
        source: the file, or the name of the configuration.
        values: the options by their full names, such as "parallelism.tensor_parallel_degree".
        facts: further facts that the system was asked for, such as its count of parameters.
    """

    system: str
    version: str
    source: str
    values: Mapping[str, OptionValue]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """Return an option's value; raise KeyError if the system does not have it."""
        return self.values[name].value

    def get(self, name: str, otherwise: Any = None) -> Any:
        """Return an option's value, or another one if the system does not have it, or it is None."""
        value = self.values[name].value if name in self.values else None
        return otherwise if value is None else value

    def first(self, *names: str) -> Any:
        """Return the value of the first of these options that the system has; None if it has none of them.

        Versions of a system name the same option differently.
        """
        return next((self.values[name].value for name in names if name in self.values), None)

    def at(self, name: str) -> str:
        """Return where an option was written, for messages: " (pretrain.sh:12)", or "" if nobody wrote it."""
        origin = self.values[name].origin if name in self.values else ""
        return f" ({origin})" if origin else ""
