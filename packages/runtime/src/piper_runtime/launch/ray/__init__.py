"""Start workers on a Ray cluster.

May import: ground, processes, worker.
"""
