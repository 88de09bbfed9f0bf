"""Facts and outputs of one host -> findings."""
