"""Tell whether a test of a shell script holds, as far as its words alone say it."""

from __future__ import annotations

from collections.abc import Sequence

_NUMBERS = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}


def truth(terms: Sequence[str]) -> bool | None:
    """Return whether a condition of these words holds, such as ["[", "a", "=", "b", "]"]; None if they do not say it.

    `&&` and `||` join tests from left to right, inside of the brackets and between them.
    """
    for operator in ("||", "&&"):
        if operator in terms:
            at = len(terms) - 1 - list(terms)[::-1].index(operator)
            sides = truth(terms[:at]), truth(terms[at + 1 :])
            decided = operator == "||"
            if decided in sides:
                return decided
            return None if None in sides else not decided
    words = [term for term in terms if term not in ("[", "]", "[[", "]]", "test")]
    if words and words[0] == "!":
        inner = truth(words[1:])
        return None if inner is None else not inner
    return _single(words, tested=len(words) < len(terms))


def _single(words: list[str], *, tested: bool) -> bool | None:
    """Return whether one test holds."""
    if words in (["true"], ["false"]) and not tested:
        return words == ["true"]
    match words:
        case [("-z" | "-n") as operator]:
            return operator == "-z"
        case [("-z" | "-n") as operator, text]:
            return (text == "") == (operator == "-z")
        case [left, ("=" | "==" | "!=") as operator, right] if not set("*?[") & set(right):
            return (left == right) == (operator != "!=")
        case [left, operator, right] if operator in _NUMBERS and left.isdigit() and right.isdigit():
            return bool(_NUMBERS[operator](int(left), int(right)))
    return None
