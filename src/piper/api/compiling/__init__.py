"""Compile a job with a strategy, and refuse what a plan cannot train.

May import: captures.
"""
