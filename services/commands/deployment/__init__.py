"""Commands for production: jobs of launchd and systemd, and the dry run of `lockstep up`."""
