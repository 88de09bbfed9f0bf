"""What ranks, scheduler and gateways measure, as parts of messages and messages of their own."""
