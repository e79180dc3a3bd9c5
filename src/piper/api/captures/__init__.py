"""Capture jobs, and keep captures between commands.

May import: content.
"""
