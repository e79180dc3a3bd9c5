"""Make the page of a run, of two runs beside each other, and Chrome traces.

May import: facts, figures, tables.
"""
