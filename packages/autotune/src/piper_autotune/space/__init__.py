"""Describe a search: its space, rules and objective.

May import: nothing of the tuner.
"""
