"""Train a job in plain PyTorch on one device, and compare.

May import: captures, compiling, running.
"""
