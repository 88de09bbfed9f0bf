"""Queries for the state of the roles, and its text for people."""
