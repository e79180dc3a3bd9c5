"""Compile a job with a strategy, and refuse jobs that a plan cannot train.

May import: captures.
"""
