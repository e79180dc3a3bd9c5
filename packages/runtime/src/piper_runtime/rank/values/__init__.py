"""Hold what a rank computes with: its stores, code, layouts, device and random numbers.

May import: nothing of the ranks.
"""
