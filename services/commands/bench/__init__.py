"""Benchmarks: the stack, its parts and its peers, each measured in turn with what it is held to."""
