"""Hold requests, results, options and reports of a run, and what watches one.

May import: nothing of the launchers.
"""
