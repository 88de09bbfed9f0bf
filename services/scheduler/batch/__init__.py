"""DOCSTRING of services.scheduler.batch."""
