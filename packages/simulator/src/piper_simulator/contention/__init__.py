"""Say what messages ask of links and devices, and at what rates things run that share them.

May import: cluster, durations.
"""
