"""Settings, hostfiles and inventories: read, merged and checked."""
