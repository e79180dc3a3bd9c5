"""Read nodes of captured graphs: their values at a number of rows, the memory they share, their dtypes.

May import: torch_api.
"""
