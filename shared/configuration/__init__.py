"""Settings, hostfiles and inventories: reading, merging and checking."""
