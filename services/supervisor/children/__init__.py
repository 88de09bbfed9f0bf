"""The child processes of `lockstep up`."""
