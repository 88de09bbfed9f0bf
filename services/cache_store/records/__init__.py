"""DOCSTRING of services.cache_store.records."""
