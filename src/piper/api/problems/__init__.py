"""Make problems of a tuner, and other strategies for the same job.

May import: captures, compiling, ground.
"""
