"""DOCSTRING of services.scheduler.speculation.model."""
