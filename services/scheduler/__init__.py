"""The scheduler: decides every step for all ranks."""
