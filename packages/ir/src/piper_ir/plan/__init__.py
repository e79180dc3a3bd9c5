"""Describe the work of each device: instructions, buffers, groups, and the files that hold them.

May import: ground, program, tools.
"""
