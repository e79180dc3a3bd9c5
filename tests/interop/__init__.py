"""Ask the parsers of other systems whether they take exports and agree with imports; see `run.py`."""
