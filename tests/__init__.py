"""What crosses packages: tests, and the helpers that package tests may import as tests.<module>."""
