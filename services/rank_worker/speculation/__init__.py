"""Drafts that the ranks propose themselves, with a draft model or an EAGLE head."""
