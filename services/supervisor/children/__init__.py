"""DOCSTRING of services.supervisor.children."""
