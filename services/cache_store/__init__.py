"""The cache store: owns one host's stored KV blocks."""
