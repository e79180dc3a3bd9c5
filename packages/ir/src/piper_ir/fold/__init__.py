"""Go through plans in order: times, steady state, memory and its owners.

May import: ground, program, plan, tools.
"""
