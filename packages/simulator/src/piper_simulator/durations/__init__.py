"""Compute the duration of each instruction of a plan that runs alone.

May import: cluster.
"""
