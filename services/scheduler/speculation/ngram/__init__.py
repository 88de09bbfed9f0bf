"""Drafts by prompt lookup (n-grams)."""
