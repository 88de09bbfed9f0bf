"""Results of checks, as text tables and JSON."""
