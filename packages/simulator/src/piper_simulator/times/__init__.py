"""Run plans: the event engine, with contention or without, ranks that differ apart, and durations that vary.

May import: cluster, durations, contention.
"""
