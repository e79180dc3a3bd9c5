"""Compile groups of pointwise operations and reductions with Inductor, and read which memory and kernels they need.

May import: ground, pointwise.
"""
