"""Joining a world: environment, rendezvous, and agreement on code, model and settings."""
