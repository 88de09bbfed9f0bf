"""Turns that clients send back: the exact tokens that the model wrote take their place."""
