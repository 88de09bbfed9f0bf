"""Keys and values: rows of running sequences, resident blocks, the stored tier."""
