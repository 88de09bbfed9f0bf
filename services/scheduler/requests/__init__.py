"""DOCSTRING of services.scheduler.requests."""
