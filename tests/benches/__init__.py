"""The benchmarks run, small: nothing is said about time."""
