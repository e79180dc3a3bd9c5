"""Hold the words that all systems share: options and their rows, the described job, and the FILE.py that says it.

May import: nothing of the systems.
"""
