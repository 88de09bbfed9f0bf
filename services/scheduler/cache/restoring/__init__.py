"""DOCSTRING of services.scheduler.cache.restoring."""
