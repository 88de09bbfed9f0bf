"""DOCSTRING of services.scheduler.world."""
