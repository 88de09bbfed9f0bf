"""What the endpoints of all APIs share: from a checked request to its answer."""
