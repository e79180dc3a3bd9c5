"""Bind the instructions of a plan to calls, and hold the state of a rank.

May import: batches, job, optimizers, values.
"""
