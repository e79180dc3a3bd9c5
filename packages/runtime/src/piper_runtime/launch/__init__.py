"""Start ranks in this process, in processes, under torchrun or on Ray; watch them, and put together what they bring back.

May import: rank, engine, transport, profile.
"""
