"""Cut the traced graph into chunks: layers, regions, the tensors between them, the places of random operators.

May import: torch_api, values, module, graphs, steps, trace, layouts.
"""
