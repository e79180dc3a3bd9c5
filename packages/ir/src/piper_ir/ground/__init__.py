"""Hold small notions that everything else uses: sizes, mesh, selectors, shards, errors, names.

May import: nothing of the IR.
"""
