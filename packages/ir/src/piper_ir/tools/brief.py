"""Show large objects in a few words: on one line, and as a small table in a notebook."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from html import escape


class Brief:
    """Show the `facts` of an object instead of its whole content, which may be millions of characters."""

    __slots__ = ()

    @abstractmethod
    def facts(self) -> Iterator[tuple[str, object]]:
        """Yield names and values, the most telling first; each value is short as a text."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {', '.join(f'{name} {value}' for name, value in self.facts())}>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
            for name, value in self.facts()
        )
        return f"<table><caption>{escape(type(self).__name__)}</caption>{rows}</table>"
