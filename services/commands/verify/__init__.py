"""Command `lockstep verify`: checks of a running Lockstep."""
