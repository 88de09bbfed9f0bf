"""Keys: API keys of clients and key pairs of hosts."""
