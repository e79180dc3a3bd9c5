"""Put captures together, keep them, and make their variants for devices that share chunks.

May import: torch_api, values, module, graphs, steps, trace, layouts, chunks, whole_batch.
"""
