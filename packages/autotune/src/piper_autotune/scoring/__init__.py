"""Score candidates, in this process, in others, or on Ray.

May import: space.
"""
