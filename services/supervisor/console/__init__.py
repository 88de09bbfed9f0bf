"""DOCSTRING of services.supervisor.console."""
