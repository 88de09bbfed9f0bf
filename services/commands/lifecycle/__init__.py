"""Commands for a Lockstep that runs: its state, its logs, drains and restarts."""
