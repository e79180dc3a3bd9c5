"""Lay out numbers of stages, experts and searches as tables.

May import: facts, figures.
"""
