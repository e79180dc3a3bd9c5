"""Trace a chunk and cut it into its steps F, I, W and R: their costs, memory, order and code.

May import: torch_api, values, graphs.
"""
