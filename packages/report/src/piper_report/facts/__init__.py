"""Read the files of a run, and derive the numbers that figures and tables show.

May import: nothing of the report.
"""
