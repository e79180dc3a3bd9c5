"""Route rows to experts, trade them between devices, and put them back.

May import: ground.
"""
