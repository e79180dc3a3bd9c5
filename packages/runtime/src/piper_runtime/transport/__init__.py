"""Carry tensors between ranks, over gloo, NCCL, or gloo with copies through the host.

May import: rank, engine.
"""
