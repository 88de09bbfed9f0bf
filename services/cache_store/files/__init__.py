"""DOCSTRING of services.cache_store.files."""
