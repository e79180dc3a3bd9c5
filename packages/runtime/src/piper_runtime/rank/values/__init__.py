"""Hold a rank's means of computing: its stores, code, layouts, device and random numbers.

May import: nothing of the ranks.
"""
