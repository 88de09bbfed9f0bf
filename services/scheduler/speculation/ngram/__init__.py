"""Drafts by prompt lookup."""
