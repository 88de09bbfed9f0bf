"""Verifying drafts: what they are, which forwards they share, what a row waits for."""
