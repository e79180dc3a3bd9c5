"""Run as one of the processes that torchrun has started.

May import: ground, worker.
"""
