"""Choose the order of instructions, and the interleaving of overlaps.

May import: steps.
"""
