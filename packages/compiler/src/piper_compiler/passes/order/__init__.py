"""Choose the order of instructions, and what overlaps.

May import: steps.
"""
