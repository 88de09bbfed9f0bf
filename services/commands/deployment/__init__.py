"""Production: jobs for launchd and systemd, and what would run on which host."""
