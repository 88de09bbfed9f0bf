"""Command `lockstep launch`: clients with the configuration for a running Lockstep."""
