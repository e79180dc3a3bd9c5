"""Search a space, keep the study, and confirm the best on hardware.

May import: scoring, space.
"""
