"""Answer `piper plan`: understand a source as a job, search its strategies, rank them, and write the chosen one.

This room may import `piper.api`, `piper.models`, `piper.views` and every package of Piper. The command line calls it,
and so may a user's program.
"""
