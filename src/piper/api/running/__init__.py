"""Execute, emulate, profile and tune.

May import: captures, compiling, content, ground, problems.
"""
