"""Prepare a user's model, batch and loss before they are traced: names, tags, kept state, metrics.

May import: torch_api, values.
"""
