"""DOCSTRING of services.commands."""
