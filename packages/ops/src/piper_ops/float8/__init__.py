"""Hold the recipes of float8 training, the ops that quantise a tensor, and the product of two quantised tensors.

May import: ground.
"""
