"""Compute the arithmetic of a shell script, `$((...))`, of whole numbers alone."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: _quotient(a, b),
    ast.Mod: lambda a, b: a - b * _quotient(a, b),
}
LONGEST = 200
"""The most letters of an expression that is computed."""


def computed(text: str) -> int | None:
    """Return the value of an expression such as "8 * (2 + 1)", with the shell's division; None for any other text."""
    try:
        return _of(ast.parse(text.strip(), mode="eval").body) if len(text) <= LONGEST else None
    except (SyntaxError, ValueError, ArithmeticError):
        return None


def _quotient(a: int, b: int) -> int:
    """Return a quotient rounded towards zero, as the shell does."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _of(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_of(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_of(node.left), _of(node.right))
    raise ValueError("no arithmetic of whole numbers")
