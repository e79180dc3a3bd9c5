"""Lower a graph to the instructions of each rank, in columns.

May import: program.
"""
