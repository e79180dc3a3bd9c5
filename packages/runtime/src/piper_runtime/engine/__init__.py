"""Run the bound instructions of a rank in the plan's order, on streams of the CPU or of a device, and record times and memory.

May import: rank.
"""
