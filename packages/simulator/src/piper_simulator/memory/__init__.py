"""Say what the memory of a device holds at its fullest and through a step, and whether it is enough.

May import: cluster.
"""
