"""Describe the global training graph that directives edit.

May import: ground, program, plan.
"""
