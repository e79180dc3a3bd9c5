"""Send a job to other processes: callables by value or by name, the state of modules and of the process.

May import: nothing of the ranks.
"""
