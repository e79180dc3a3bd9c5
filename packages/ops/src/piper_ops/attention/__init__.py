"""Compute attention as one node on every device, also in parts of keys and heads.

May import: ground.
"""
