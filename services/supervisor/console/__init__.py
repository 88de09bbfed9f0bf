"""Output of `lockstep up`."""
