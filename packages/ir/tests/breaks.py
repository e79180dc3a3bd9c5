"""Changes of a good plan, each of which breaks one rule of `verify`; several test files fill such a list."""

from __future__ import annotations

from collections.abc import Callable

from piper_ir.plan.plan import Plan
from piper_ir.verify import check
from tests.helpers.cases import each_case

Break = Callable[[Plan], Plan]


class Breaks:
    """The changes of one good plan, in the order in which a file registers them.

    Attributes:
        rows: the rule that a change breaks, words that the message must have, and the change.
    """

    def __init__(self, good: Plan) -> None:
        self.good = good
        self.rows: list[tuple[str, str, Break]] = []

    def __call__(self, rule: str, message: str) -> Callable[[Break], Break]:
        """Register a change; it breaks this rule and no other."""

        def register(change: Break) -> Break:
            self.rows.append((rule, message, change))
            return change

        return register

    @property
    def rules(self) -> set[str]:
        return {rule for rule, _, _ in self.rows}

    def check(self) -> None:
        """Assert of each change that it breaks its rule, and that the message is found."""

        @each_case(("rule", "message", "change"), self.rows, [f"{r}: {m}" for r, m, _ in self.rows])
        def breaks_one_rule(rule: str, message: str, change: Break) -> None:
            violations = check(change(self.good))
            assert {v.rule for v in violations} == {rule}, [v.message for v in violations]
            assert any(message in v.message for v in violations), [v.message for v in violations]

        breaks_one_rule()
