"""Ranks for benchmarks: one without a model, and ones without a scheduler."""
