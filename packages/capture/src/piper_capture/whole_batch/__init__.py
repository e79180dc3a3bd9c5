"""See to it that microbatches add up to the whole batch: losses, counts, rows that are kept apart.

May import: torch_api, values, module, graphs, steps, trace, layouts, chunks.
"""
