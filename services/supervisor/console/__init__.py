"""What `lockstep up` prints."""
