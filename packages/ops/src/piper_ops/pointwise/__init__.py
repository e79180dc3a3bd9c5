"""Compute norms, losses, shared vocabularies, collectives inside of steps, and batches.

May import: ground.
"""
