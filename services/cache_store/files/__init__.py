"""The files in the store's directory."""
