"""Faults that are put into compiler, runtime and job, and the test that each is caught."""
