"""Say how long each instruction of a plan takes where nothing runs beside it.

May import: cluster.
"""
