"""Read and write files of results, costs and clusters.

May import: nothing of the calls.
"""
