"""DOCSTRING of services.scheduler.speculation.ngram."""
