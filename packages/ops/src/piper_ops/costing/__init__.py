"""Say what kernels cost: FLOPs, bytes and workspace of each op.

May import: ground, attention, pointwise, experts.
"""
