"""Explain a compiled plan in words: its stages and instructions, layouts, exchanges, recomputation and shared states.

May import: nothing of the views.
"""
