"""Benchmarks of the whole stack over HTTP."""
