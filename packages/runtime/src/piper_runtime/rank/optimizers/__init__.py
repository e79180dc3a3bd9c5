"""Run optimizers on flat parts of parameters, and find out on which they can run.

May import: job, values.
"""
