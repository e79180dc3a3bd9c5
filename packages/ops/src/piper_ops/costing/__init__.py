"""Count the costs of kernels: FLOPs, bytes and workspace of each op.

May import: ground, attention, pointwise, experts, float8.
"""
