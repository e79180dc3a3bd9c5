"""Provide the calls of a user's program, and the files of their results.

These are compile, execute, profile, tune, verify and emulate. This room may import every package of Piper, but no other
room of `piper`: nothing here prints tables or knows the command line.
"""
