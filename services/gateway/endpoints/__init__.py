"""The HTTP endpoints that generate text."""
