"""The gateway's links to the scheduler and to this host's cache store."""
