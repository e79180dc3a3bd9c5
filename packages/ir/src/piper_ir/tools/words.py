"""Find words in a sentence."""

from __future__ import annotations

import re

_PLAIN = r"(?<!\bno )(?<!\bnot )(?<!\bwithout )"


def says(text: str, words: str) -> bool:
    """Return whether a text has some words, without a "no", "not" or "without" before them."""
    return re.search(_PLAIN + re.escape(words), text) is not None


def names(text: str, word: str) -> bool:
    """Return whether a text has a name in any case, which no letter follows; as `says` does, not behind a "no"."""
    return re.search(rf"{_PLAIN}{re.escape(word)}(?![a-z])", text, re.IGNORECASE) is not None
