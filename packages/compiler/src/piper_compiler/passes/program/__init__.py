"""Complete a graph: wiring, gradients, buckets, recomputation and messages.

May import: nothing of the passes.
"""
