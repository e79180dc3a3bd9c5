"""Draw random numbers that depend on the seed, the step, the place and the row alone.

May import: nothing of the ops.
"""
