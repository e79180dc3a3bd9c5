"""Explain why a step takes as long as it does, which constants would change it, and how two steps differ.

May import: cluster, durations, times, memory.
"""
