"""The running batch on one rank, and which of its rows share a forward."""
