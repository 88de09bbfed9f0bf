"""Code that all services use: messages, links, configuration, limits, errors, clock and log."""
