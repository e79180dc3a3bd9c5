"""What is captured of a model, when a capture is used again, and where initial weights come from."""
