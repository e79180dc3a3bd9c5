"""Run the ranks of one worker, and carry messages to it.

May import: ground.
"""
