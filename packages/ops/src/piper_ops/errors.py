"""The one error of piper_ops."""

from __future__ import annotations


class UnsupportedVariant(ValueError):
    """An op, or a variant of one, that has no portable form: the message names it, the user's line, and the way out."""
