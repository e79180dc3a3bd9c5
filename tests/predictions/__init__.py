"""What is said before a run: time, memory, explanations, searches."""
