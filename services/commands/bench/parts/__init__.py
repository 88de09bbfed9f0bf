"""Benchmarks of single parts: gateway, scheduler steps, splits of a model."""
