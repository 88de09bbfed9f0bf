"""Resident KV blocks and checkpoints of one rank: kept, evicted and reused as plans say."""
