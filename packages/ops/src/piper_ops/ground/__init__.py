"""Register operators with torch, and hold the error of calls that have no portable form.

May import: nothing of the ops.
"""
