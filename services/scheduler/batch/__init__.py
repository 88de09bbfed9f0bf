"""The running batch, and the plans that are made of it."""
