"""Restoring stored blocks."""
