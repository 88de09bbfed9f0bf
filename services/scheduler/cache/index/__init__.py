"""DOCSTRING of services.scheduler.cache.index."""
