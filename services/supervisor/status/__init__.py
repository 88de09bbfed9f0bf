"""The scheduler's status, as the supervisor reads and shows it."""
