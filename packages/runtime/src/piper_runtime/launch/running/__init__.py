"""Run a plan by a launcher, and go on after a failure.

May import: ground, processes, ray, torchrun.
"""
