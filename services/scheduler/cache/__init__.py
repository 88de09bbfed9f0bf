"""KV blocks as the scheduler plans them. `manager.BlockCache` is the entry point. Pure."""
