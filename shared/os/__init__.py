"""Operating system services for a process: files, locks, streams and the parent's lifeline."""
