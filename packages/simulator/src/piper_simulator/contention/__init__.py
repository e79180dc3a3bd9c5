"""Say which links and devices messages use, and at what rates activities run that share them.

May import: cluster, durations.
"""
