"""Replace calls of torch in a captured graph by portable ones, or refuse them by name.

May import: ground, attention, pointwise, written.
"""
