"""The gateway: HTTP and text in front, token ids behind."""
