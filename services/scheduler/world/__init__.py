"""The ranks and the epoch."""
