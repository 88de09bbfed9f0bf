"""Demands of chat templates on messages: found by trying the template, and met."""
