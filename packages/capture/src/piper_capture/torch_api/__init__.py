"""Hold torch's private API that the capture uses, so that a new release of torch is a change in one place.

May import: nothing of the capture.
"""
