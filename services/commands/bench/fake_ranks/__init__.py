"""Ranks for benchmarks: without a model, or without a scheduler."""
