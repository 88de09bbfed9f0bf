"""The world: rank processes, epochs and recovery."""
