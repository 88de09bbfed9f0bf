"""DOCSTRING of services.supervisor.status."""
