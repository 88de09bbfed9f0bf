"""The running batch and its step plans."""
