"""Describe the result of a search.

May import: ground, tools.
"""
