"""Describe what each device does: instructions, buffers, groups, and the files that hold them.

May import: ground, program, tools.
"""
