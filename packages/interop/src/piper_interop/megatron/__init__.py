"""Read jobs of Megatron-LM and write them: its options as a table, the described job, and the export.

May import: neutral.
"""
