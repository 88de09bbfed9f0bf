"""The KV of running sequences: one interface and two implementations."""
