"""Execution of step plans."""
