"""Split a line of a plan's text into words, and write one: a word with spaces, or a keyword, is a JSON string."""

from __future__ import annotations

import json
import re
from typing import Any

from piper_ir.ground.codec import unique_keys
from piper_ir.ground.errors import FormatError

_CLAUSES = ("node", "reads", "writes", "holding", "frees", "waits", "allocs", "takes")
_FLAGS = ("weighted", "clip", "holds", "once", "over", "keeping", "apart")
_RESERVED = {"+", "|", *_CLAUSES, *_FLAGS}
_BARE = re.compile(r'[^\s"@#|+{\[][^\s"]*\Z')
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[^\s"]+')


def written_word(text: str) -> str:
    """Return a word as it stands in a line."""
    return text if _BARE.match(text) and text not in _RESERVED else json.dumps(text)


class Words:
    """Read the words of a line one by one; a JSON string counts as one word and is marked as quoted."""

    def __init__(self, text: str, limit: int = -1) -> None:
        self._words: list[tuple[str, bool]] = []
        self._at = 0
        end = 0
        for match in _TOKEN.finditer(text):
            if text[end : match.start()].strip():
                break
            end = match.end()
            quoted = match[0].startswith('"')
            self._words.append((read_value(match[0]) if quoted else match[0], quoted))
            if len(self._words) == limit:
                break
        self.rest = text[end:].strip()
        if self.rest and limit < 0:
            raise FormatError(f"a quotation mark without its end at: {self.rest}")

    def more(self) -> bool:
        return self._at < len(self._words)

    def peek(self) -> tuple[str, bool]:
        """Return the next word and whether it is quoted, without going on; ("", False) at the end."""
        return self._words[self._at] if self.more() else ("", False)

    def next(self, expected: str) -> str:
        if not self.more() or self._special():
            raise FormatError(
                f"{expected} is expected "
                f"{f'before {self.peek()[0]}' if self.more() else 'at the end'}"
            )
        self._at += 1
        return self._words[self._at - 1][0]

    def _special(self) -> bool:
        word, quoted = self.peek()
        return not quoted and (word in _RESERVED or word.startswith("@"))

    def accept(self, *options: str) -> str:
        """Return the next word and go past it if it is one of these (unquoted), else return ""."""
        word, quoted = self.peek()
        if quoted or word not in options:
            return ""
        self._at += 1
        return word

    def names(self) -> tuple[str, ...]:
        """Return all words up to the next keyword, and go past them."""
        start = self._at
        while self.more() and not self._special():
            self._at += 1
        return tuple([w for w, _ in self._words[start : self._at]])

    def microbatch(self) -> int:
        word, quoted = self.peek()
        if quoted or not word.startswith("@"):
            return -1
        self._at += 1
        return whole_number(word[1:], "a microbatch such as @3")

    def end(self, expected: str = "the end of the line") -> None:
        if self.more():
            raise FormatError(f"{expected} is expected before {self.peek()[0]}")


def read_value(text: str) -> Any:
    """Return the content of a JSON text in a line; raise FormatError if it is invalid."""
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as e:
        raise FormatError(
            f"not JSON: {e.msg} at column {e.colno} of {text[:40]}{'...' if len(text) > 40 else ''}"
        ) from None
    except (RecursionError, ValueError) as e:  # nested too deep; an integer of thousands of digits
        raise FormatError(f"not JSON that this Piper writes: {e}") from None


def whole_number(text: str, expected: str) -> int:
    """Return the number that a word is; raise FormatError, which names `expected`, if it is none."""
    try:
        return int(text)
    except ValueError:
        raise FormatError(f"{expected} is expected, found {text[:40]!r}") from None
