"""The link to the scheduler and its last status."""
