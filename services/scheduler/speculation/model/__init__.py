"""Drafts of the ranks' own draft model or head."""
