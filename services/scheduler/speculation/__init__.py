"""Speculative decoding in the scheduler; `speculator.Speculator` is its interface. Pure."""
