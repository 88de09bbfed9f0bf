"""Conversations: what every dialect of the API says to a model, and what chat templates expect."""
