"""Describe a job: model, batch, loss, optimizer, precision, and advice on it.

May import: nothing of the ranks.
"""
