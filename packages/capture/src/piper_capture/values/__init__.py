"""Read nodes of captured graphs: their values at a number of rows, their storages, their dtypes.

May import: torch_api.
"""
