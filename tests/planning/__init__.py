"""`piper plan`: sources, answers, and the files that it writes."""
