"""Conversations that the demo model learns: their format, skills, facts and frequencies."""
