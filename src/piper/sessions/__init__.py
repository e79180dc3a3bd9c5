"""Run whole sessions: they predict, run, print one beside the other, and leave a folder with a report.

This room may import `piper.api`, `piper.views` and every package of Piper. The command line calls it, and so may a
user's program.
"""
