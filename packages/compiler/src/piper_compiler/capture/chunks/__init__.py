"""Cut the traced graph into chunks: layers, regions, what passes between them, the places of random numbers.

May import: torch_api, values, module, graphs, steps, trace, layouts.
"""
