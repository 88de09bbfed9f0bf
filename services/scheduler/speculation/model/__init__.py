"""Drafts proposed by the ranks with a draft model or an EAGLE head."""
