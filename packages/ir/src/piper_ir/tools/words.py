"""Find words in a sentence."""

from __future__ import annotations

import re


def says(text: str, words: str) -> bool:
    """Return whether a text has some words, without a "no", "not" or "without" before them."""
    return re.search(rf"(?<!\bno )(?<!\bnot )(?<!\bwithout ){re.escape(words)}", text) is not None
