"""Attention of decoder layers, one module for each form that is known."""
