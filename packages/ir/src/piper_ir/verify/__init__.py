"""Decide whether a plan is right, by an abstract run that honours every blocking condition of the real engines.

Nothing else in Piper decides that. The modules here may import the vocabulary of `piper_ir` (plan, ops, memory, ...)
and `piper_ir.tools`. All of them import `rules`, and `verifier` puts them together.

May import: ground, program, plan, fold, tools.
"""

from piper_ir.verify.rules import RULES, Violation, instr_title
from piper_ir.verify.verifier import check, check_joined, verify

__all__ = ["RULES", "Violation", "check", "check_joined", "instr_title", "verify"]
