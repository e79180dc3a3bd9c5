"""Define the errors of piper_ops."""

from __future__ import annotations


class UnsupportedVariant(ValueError):
    """Report an op, or a variant of one, that has no portable form; the message has the user's line and the way out."""


class ExpertsOverflow(RuntimeError):
    """Report that more tokens chose experts than these have places; the message has the factor that would be enough."""


class WrongCost(ValueError):
    """Report a formula of `op_cost` that fails, or gives no number; the message names the op and the formula."""
