"""Start workers as processes of this machine, also emulated ones.

May import: ground, worker.
"""
