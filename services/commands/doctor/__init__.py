"""Command `lockstep doctor`: findings about hosts, cables and settings. It changes nothing."""
