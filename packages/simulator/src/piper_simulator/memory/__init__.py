"""Compute the contents of a device's memory at its fullest and through a step, and whether the memory is enough.

May import: cluster, durations, times.
"""
