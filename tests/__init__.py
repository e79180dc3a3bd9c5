"""Tests of what crosses packages, by subject; `tests.helpers` has the models, jobs and plans that tests share."""
