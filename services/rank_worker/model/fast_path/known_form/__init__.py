"""Layers of a known form, computed by our own code in few operations."""
