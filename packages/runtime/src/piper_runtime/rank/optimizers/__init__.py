"""Run optimizers on flat parts of parameters, and find out which parts they can run on.

May import: job, values.
"""
