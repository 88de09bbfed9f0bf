"""Kernels of the fast path: sources, their dialects, and functions that start them."""
