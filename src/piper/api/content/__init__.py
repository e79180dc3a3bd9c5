"""Digest the content of a user's callables.

May import: ground.
"""
