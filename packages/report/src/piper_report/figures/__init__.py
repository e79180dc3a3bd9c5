"""Draw schedules, memory, experts, training and searches.

May import: facts.
"""
