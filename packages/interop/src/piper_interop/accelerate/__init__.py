"""Read jobs of Accelerate and write them: its options as a table, the described job, and the export.

May import: neutral, deepspeed.
"""
