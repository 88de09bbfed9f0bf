"""Requests and their sequences."""
