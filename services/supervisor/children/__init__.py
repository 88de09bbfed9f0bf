"""Child processes of `lockstep up`: their start, restart, configuration and end."""
