"""Commands for a Lockstep that runs: its state, drains and restarts."""
