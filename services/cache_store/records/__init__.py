"""Which records the store holds."""
