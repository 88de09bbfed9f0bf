"""Sampling of the next token from logits: pure in logits, settings, seed, position."""
