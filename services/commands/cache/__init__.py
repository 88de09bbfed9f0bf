"""Command `lockstep cache`: questions to the cache store, and their answers."""
