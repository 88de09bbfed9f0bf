"""Anthropic's Messages API: request types, reading, responses and errors."""
