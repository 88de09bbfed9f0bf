"""The gateway's link to the scheduler, and the scheduler's last status."""
