"""What runs write, and the reports that read it."""
