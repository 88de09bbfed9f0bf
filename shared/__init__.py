"""What every room shares: messages, the bus, configuration, limits, errors, clock and log."""
