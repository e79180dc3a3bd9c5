"""Hold requests, results, options and reports of a run, and its watch.

May import: nothing of the launchers.
"""
