"""Where a model's files are, and what they say without being loaded."""
