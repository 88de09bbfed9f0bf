"""Formats of tool calls in a model's text, one module per kind of grammar."""
