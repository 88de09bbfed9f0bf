"""Benchmarks of one part: gateway, scheduler steps, splits of a model."""
