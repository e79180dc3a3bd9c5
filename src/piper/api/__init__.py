"""What a user's program calls, and the files of results behind it.

These are compile, execute, profile, tune, verify and emulate. This room may import every package of Piper, but no other
room of `piper`: nothing here prints tables or knows the command line.
"""
