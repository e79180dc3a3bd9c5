"""Rewrite the joint graph of a chunk's forward and backward, op by op, without changing its numbers.

May import: torch_api, values.
"""
