"""Describe a captured model: chunks with their steps, inputs, outputs and costs.

May import: ground, tools.
"""
