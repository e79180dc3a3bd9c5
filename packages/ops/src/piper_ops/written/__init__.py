"""Run modules as they were written, under autograd, inside of a plan.

May import: nothing of the ops.
"""
