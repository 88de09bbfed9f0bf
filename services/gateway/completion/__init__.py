"""Completions in progress: tokens in, text and events out."""
