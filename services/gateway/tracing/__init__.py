"""Traces of HTTP requests: their times and writes, clients' trace ids, and exported spans."""
