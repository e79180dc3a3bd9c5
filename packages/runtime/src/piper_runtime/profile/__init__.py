"""Measure on real ranks what the pieces of a program cost: compute, messages, memory and the host.

May import: rank, engine, transport.
"""
