"""Get the rows of a step from a job's batch function, also beside training.

May import: job, sending, values.
"""
