"""Reliable links between processes over ZeroMQ."""
