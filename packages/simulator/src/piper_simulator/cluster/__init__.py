"""Describe clusters: devices, links, networks, built-in ones by name, and the files that hold others.

May import: nothing of the simulator.
"""
