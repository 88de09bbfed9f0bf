"""Several hosts from one inventory; launchd and systemd units; what runs where."""
