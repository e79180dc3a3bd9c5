"""Say which links and devices messages use, and compute the rates of activities that share them.

May import: cluster, durations.
"""
