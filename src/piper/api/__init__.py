"""What a user's program calls: compile, execute, profile, tune, verify and emulate, and the files of results behind them.

It may import every package of Piper, but no other room of `piper`: nothing here prints tables or knows the command line.
"""
