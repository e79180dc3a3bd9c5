"""Bind a plan to one rank: its job, code, tensors and optimizer, and a closure for each instruction.

May import: nothing of the runtime.
"""
