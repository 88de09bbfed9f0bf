"""DOCSTRING of services.commands.cache."""
