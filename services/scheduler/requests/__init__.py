"""Requests, their sequences and the waiting queue."""
