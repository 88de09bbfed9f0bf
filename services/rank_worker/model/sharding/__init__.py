"""Sharding: a whole model is reduced to the part that one rank holds."""
